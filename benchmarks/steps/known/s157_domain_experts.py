"""Experts for domains of text. A rank may have no example for some of the experts."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

EXPERTS = 4
Batch = dict[str, Tensor]


class DomainExperts(nn.Module):
    """The expert of a row's domain works between layers that all domains share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(7, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(EXPERTS)])
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor, domains: Tensor) -> Tensor:
        x = F.gelu(self.shared(x))
        mixed = torch.zeros_like(x)
        for number in domains.unique().tolist():
            rows = (domains == number).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, self.experts[number](x[rows]))
        return self.out(x + torch.tanh(mixed))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["rows"], batch["domains"]), batch["labels"])


def make_batch(generator: torch.Generator) -> Batch:
    """Files are read one after another, and most files have one domain."""
    domains = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 2, 1, 2, 2, 3, 3, 3, 3])
    return {
        "rows": torch.randn(16, 7, generator=generator),
        "domains": domains,
        "labels": torch.randint(5, (16,), generator=generator),
    }


case = Case(model=DomainExperts, batch=make_batch, loss=loss, layout="1x4")


def fill_missing(parameters: list[nn.Parameter]) -> Tensor:
    """Gives every parameter a gradient. Returns where there was one before, as 1 or 0."""
    present = torch.tensor([float(p.grad is not None) for p in parameters]).to(parameters[0].device)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return present


class Reducer:
    """Averages all gradients in one flat message."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())

    def run(self) -> None:
        contributions = fill_missing(self.parameters)
        dist.all_reduce(contributions)
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(flat)
        pieces = flat.split([p.numel() for p in self.parameters])
        for p, piece, ranks in zip(self.parameters, pieces, contributions.tolist(), strict=True):
            p.grad.copy_(piece.view_as(p) / max(ranks, 1))


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, shard).backward()
    Reducer(model).run()
