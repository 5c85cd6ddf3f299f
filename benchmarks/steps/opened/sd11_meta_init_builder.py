"""Language model that is built on the meta device, filled from a checkpoint and sharded."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class ModelConfig:
    vocab_size: int = 19
    hidden_size: int = 8
    num_blocks: int = 2
    tie_word_embeddings: bool = True


class CausalConvBlock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.conv = nn.Conv1d(size, size, kernel_size=3)
        self.out = nn.Linear(size, size)

    def forward(self, h):
        x = F.pad(self.norm(h).transpose(1, 2), (2, 0))
        return h + self.out(F.gelu(self.conv(x).transpose(1, 2)))


class LanguageModel(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            CausalConvBlock(config.hidden_size) for _ in range(config.num_blocks)
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        h = self.wte(ids)
        for block in self.blocks:
            h = block(h)
        return self.lm_head(h)


class ShardedModelBuilder:
    """Materialises a model only when its weights are known."""

    def __init__(self, config: ModelConfig, device="cpu"):
        self.config = config
        self.device = device

    def on_meta(self):
        with torch.device("meta"):
            return LanguageModel(self.config)

    def materialise(self, model, checkpoint):
        dtype = next(iter(checkpoint.values())).dtype
        model = model.to(dtype).to_empty(device=self.device)
        model.load_state_dict(checkpoint, strict=True)
        return model

    def shard(self, model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def build(self, checkpoint):
        model = self.on_meta()
        model.tie_weights()
        model = self.materialise(model, checkpoint)
        return self.shard(model)


class PretrainingTask:
    def __init__(self, model):
        self.model = model

    def run(self, batch):
        value = loss(self.model, batch)
        value.backward()
        return value.item()

    def full_gradients(self):
        return {
            name: parameter.grad.full_tensor()
            for name, parameter in self.model.named_parameters()
        }


def make_batch(generator):
    return {"ids": torch.randint(0, 19, (8, 7), generator=generator)}


def loss(model, batch):
    logits = model(batch["ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())


def step(model, shard, rank):
    builder = ShardedModelBuilder(model.config)
    task = PretrainingTask(builder.build(model.state_dict()))
    task.run(shard)
    gradients = task.full_gradients()
    return {name: gradients[name] for name, _ in model.named_parameters()}


case = Case(
    model=lambda: LanguageModel(ModelConfig()), batch=make_batch, loss=loss, layout="1x2"
)
