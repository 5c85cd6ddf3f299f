"""Full fine-tuning recipe for a small causal LM on a hybrid-sharded mesh (replicas across hosts, shards inside a host)."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

IGNORE = -100


@dataclass
class ModelArgs:
    vocab_size: int = 37
    dim: int = 16
    hidden: int = 24
    n_layers: int = 2
    kernel: int = 3


class ConvBlock(nn.Module):
    """Causal depthwise convolution followed by a gated feed-forward."""

    def __init__(self, args):
        super().__init__()
        self.kernel = args.kernel
        self.norm = nn.RMSNorm(args.dim)
        self.mix = nn.Conv1d(args.dim, args.dim, args.kernel, groups=args.dim)
        self.gate = nn.Linear(args.dim, args.hidden)
        self.up = nn.Linear(args.dim, args.hidden)
        self.down = nn.Linear(args.hidden, args.dim)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (self.kernel - 1, 0))
        x = x + self.mix(h).transpose(1, 2)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class CausalLM(nn.Module):
    def __init__(self, args=None):
        super().__init__()
        args = args or ModelArgs()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(ConvBlock(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def instruct_batch(generator):
    tokens = torch.randint(0, 37, (16, 13), generator=generator)
    prompt = torch.randint(1, 11, (16, 1), generator=generator)
    labels = torch.where(torch.arange(13) < prompt, torch.full_like(tokens, IGNORE), tokens)
    return {"tokens": tokens, "labels": labels}


def summed_ce(model, batch):
    """Cross-entropy summed over answer tokens, and how many there were."""
    logits = model(batch["tokens"][:, :-1])
    labels = batch["labels"][:, 1:].reshape(-1)
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum"), (labels != IGNORE).sum()


def loss(model, batch):
    total, count = summed_ce(model, batch)
    return total / count


class FullFinetuneRecipe:
    def __init__(self, model, nodes, per_node):
        self.mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("dp_replicate", "dp_shard"))
        self.world_size = self.mesh.size()
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh, reshard_after_forward=False)
        self.model = model

    def scale_grads(self, scaler):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad *= scaler

    def train_step(self, batch):
        # backward on the un-normalised loss, so the activations are freed at once; normalise just before the optimizer
        total, num_tokens = summed_ce(self.model, batch)
        total.backward()
        dist.all_reduce(num_tokens, group=self.mesh.get_group("dp_shard"))
        # the sharded backward has averaged over the data-parallel ranks
        self.scale_grads(self.world_size / num_tokens.item())


def step(model, shard, rank):
    recipe = FullFinetuneRecipe(model, rank.world_size // 2, 2)
    recipe.train_step(shard)
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=CausalLM, batch=instruct_batch, loss=loss, layout="2x2")
