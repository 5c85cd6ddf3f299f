"""Token-weighted loss with fully_shard: FSDP sums, and the loss divides by the global count."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

VOCAB, DIM, SEQ = 31, 10, 9


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, 16, bias=False)
        self.up = nn.Linear(DIM, 16, bias=False)
        self.down = nn.Linear(16, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): FeedForward() for i in range(2)})
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(x)


def batch(generator):
    ids = torch.randint(0, VOCAB, (12, SEQ), generator=generator)
    keep = torch.rand(12, SEQ, generator=generator) < torch.linspace(0.3, 0.9, 12)[:, None]
    return {"ids": ids, "labels": ids.roll(-1, 1), "mask": keep}


def summed_loss(model, data):
    logits = model(data["ids"]).flatten(0, 1)
    per_token = F.cross_entropy(logits, data["labels"].flatten(), reduction="none")
    return (per_token * data["mask"].flatten()).sum()


def loss(model, batch):
    return summed_loss(model, batch) / batch["mask"].sum()


def disable_gradient_division(model):
    """The loss is normalised by the global number of tokens, so FSDP must not divide again."""
    model.set_gradient_divide_factor(1.0)


def setup(model):
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    disable_gradient_division(model)


def step(model, shard, rank):
    setup(model)
    tokens = shard["mask"].sum()
    dist.all_reduce(tokens)
    (summed_loss(model, shard) / tokens).backward()


case = Case(model=LanguageModel, batch=batch, loss=loss, layout="1x4")
