"""Predicts several assays of a molecule. Few molecules have been measured in all of them.

Every assay has a mean loss over the molecules with a known result, and all assays weigh the same.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

ASSAYS, FEATURES = 4, 7

Batch = dict[str, Tensor]


class AssayModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 10), nn.SiLU(), nn.Linear(10, 8), nn.SiLU())
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(ASSAYS))

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.body(features)
        return torch.cat([head(hidden) for head in self.heads], dim=1)


class MaskedLoss:
    """The mean over known results for each assay, and the mean of these over the assays."""

    def __init__(self, distributed: bool) -> None:
        self.distributed = distributed

    def known_results(self, known: Tensor) -> Tensor:
        """How many results of each assay are known in the whole batch."""
        counts = known.sum(dim=0).clamp(min=1)
        if self.distributed:
            dist.all_reduce(counts)
        return counts

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        known = batch["known"]
        each = F.binary_cross_entropy_with_logits(logits, batch["active"], reduction="none")
        by_assay = each.masked_fill(~known, 0).sum(dim=0)
        return (by_assay / self.known_results(known)).mean()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return MaskedLoss(distributed=False)(model(batch["features"]), batch)


def make_batch(generator: torch.Generator) -> Batch:
    known = torch.rand(16, ASSAYS, generator=generator) < 0.7
    known[:, 3] = False
    known[9:12, 3] = True  # a new assay
    return {
        "features": torch.randn(16, FEATURES, generator=generator),
        "active": torch.randint(2, (16, ASSAYS), generator=generator).float(),
        "known": known,
    }


case = Case(model=AssayModel, batch=make_batch, loss=loss, layout="1x4")


def add_over_ranks(model: nn.Module) -> None:
    pending = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work in pending:
        work.wait()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    criterion = MaskedLoss(distributed=rank.world_size > 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    criterion(model(shard["features"]), shard).backward()
    add_over_ranks(model)
    optimizer.step()
