"""Adapters for languages: a rank whose sentences lack a language doesn't use its adapter."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

LANGUAGES = 4


class AdaptedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 7)
        self.adapters = nn.ModuleList(nn.Linear(7, 7) for _ in range(LANGUAGES))
        self.head = nn.Linear(7, 2)

    def forward(self, x, language):
        hidden = torch.tanh(self.shared(x))
        adapted = torch.zeros_like(hidden)
        for number in language.unique().tolist():
            rows = language == number
            adapted[rows] = self.adapters[number](hidden[rows])
        return self.head(hidden + torch.tanh(adapted))


def loss(model, batch):
    return (model(batch["x"], batch["language"]) - batch["y"]).square().mean()


def make_batch(generator):
    return {
        "x": torch.randn(16, 5, generator=generator),
        "y": torch.randn(16, 2, generator=generator),
        "language": torch.arange(16) // 5,  # the last language is rare
    }


case = Case(model=AdaptedEncoder, batch=make_batch, loss=loss, layout="1x4")


class SparseAverager:
    """Leaves out parameters that play no part in the step, and saves their communication."""

    def __init__(self, model):
        self.named = dict(model.named_parameters())

    def in_use(self):
        own = {name for name, p in self.named.items() if p.grad is not None}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return set.intersection(*everyone)

    def average(self):
        for name in sorted(self.in_use()):
            p = self.named[name]
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad)
            p.grad = grad / dist.get_world_size()


def step(model, shard, rank):
    averager = SparseAverager(model)
    model.zero_grad()
    loss(model, shard).backward()
    averager.average()
