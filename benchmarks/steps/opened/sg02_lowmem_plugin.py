"""Memory-efficient start-up for sharded training: modules are made on the meta device and filled shard by shard."""
import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

VOCAB, WIDTH, HEADS, CONTEXT = 29, 16, 2, 10


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.ln2(x))


class GPTForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.size(1)]
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def lm_loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@dataclass
class ShardingPlugin:
    """What the launcher fills from its YAML file."""

    reshard_after_forward: bool = True
    cpu_ram_efficient_loading: bool = True
    transformer_cls_names_to_wrap: tuple = ("DecoderLayer",)

    def materialize(self, skeleton, state_dict):
        # one rank at a time never holds more than a single full copy
        skeleton.to_empty(device="cpu")
        skeleton.load_state_dict(state_dict, strict=True)
        return skeleton

    def wrap(self, module):
        for child in list(module.modules()):
            if type(child).__name__ in self.transformer_cls_names_to_wrap:
                fully_shard(child, reshard_after_forward=self.reshard_after_forward)
        return fully_shard(module, reshard_after_forward=False)


class Accelerator:
    def __init__(self, plugin=None):
        self.plugin = plugin or ShardingPlugin()

    def prepare(self, model):
        if not self.plugin.cpu_ram_efficient_loading:
            return self.plugin.wrap(model)
        state_dict = model.state_dict()
        skeleton = copy.deepcopy(model).to("meta")
        return self.plugin.wrap(self.plugin.materialize(skeleton, state_dict))

    def backward(self, value):
        value.backward()


def corpus(generator):
    return torch.randint(0, VOCAB, (8, CONTEXT + 1), generator=generator)


def step(model, shard, rank):
    accelerator = Accelerator()
    prepared = accelerator.prepare(model)
    accelerator.backward(lm_loss(prepared, shard))
    trained = dict(prepared.named_parameters())
    return {name: trained[name].grad for name, _ in model.named_parameters()}


case = Case(model=GPTForCausalLM, batch=corpus, loss=lm_loss, layout="1x2")
