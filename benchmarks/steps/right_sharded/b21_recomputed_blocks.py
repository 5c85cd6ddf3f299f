"""fully_shard on blocks that are recomputed in the backward pass with the re-entrant checkpoint.

The first input of a re-entrant checkpoint has to require a gradient. The embedding sees to that.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

TOKENS, WIDTH, LABELS = 19, 10, 7


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.outer = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.outer(nn.functional.silu(self.gate(y)) * self.inner(y))


class Stack(nn.Module):
    def __init__(self, depth=3, every=1):
        super().__init__()
        self.every = every
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleDict({f"layer{number}": Layer() for number in range(depth)})
        self.attention = nn.Linear(WIDTH, 1, bias=False)
        self.labels = nn.Linear(WIDTH, LABELS)

    def is_recomputed(self, number):
        return torch.is_grad_enabled() and number % self.every == 0

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers.values()):
            x = checkpoint(layer, x, use_reentrant=True) if self.is_recomputed(number) else layer(x)
        weights = self.attention(x).softmax(1)
        return self.labels((weights * x).sum(1))


def batch(generator):
    return {
        "tokens": torch.randint(TOKENS, (12, 6), generator=generator),
        "labels": torch.randint(2, (12, LABELS), generator=generator).double(),
    }


def loss(model, batch):
    logits = model(batch["tokens"])
    return nn.functional.multilabel_soft_margin_loss(logits, batch["labels"])


def step(model, shard, rank):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    value = loss(model, shard)
    value.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


case = Case(model=Stack, batch=batch, loss=loss, layout="1x2")
