"""Swapped prediction of prototypes: codes of one view are predicted from the other view."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

PROTOTYPES = 6
TEMPERATURE = 0.5
EPSILON = 0.5
ITERATIONS = 3


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))
        self.prototypes = nn.Linear(5, PROTOTYPES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.prototypes(F.normalize(self.body(x), dim=1))


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    q = torch.exp(scores / EPSILON).T
    q /= q.sum()
    for _ in range(ITERATIONS):
        q /= q.sum(dim=1, keepdim=True) * PROTOTYPES
        q /= q.sum(dim=0, keepdim=True) * q.shape[1]
    return (q * q.shape[1]).T


@torch.no_grad()
def distributed_sinkhorn(scores: Tensor, world_size: int) -> Tensor:
    """Codes of the rank's own samples, with equal shares of all prototypes over all ranks."""
    q = torch.exp(scores / EPSILON).T
    samples = q.shape[1] * world_size
    total = q.sum()
    dist.all_reduce(total)
    q /= total
    for _ in range(ITERATIONS):
        share = q.sum(dim=1, keepdim=True)
        q /= share * PROTOTYPES
        q /= q.sum(dim=0, keepdim=True) * samples
    return (q * samples).T


def swapped(scores: tuple[Tensor, Tensor], codes: tuple[Tensor, Tensor]) -> Tensor:
    first, second = (F.log_softmax(s / TEMPERATURE, dim=1) for s in scores)
    return -((codes[0] * second).sum(dim=1) + (codes[1] * first).sum(dim=1)).mean() / 2


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["first"]), model(batch["second"])
    return swapped(scores, (sinkhorn(scores[0]), sinkhorn(scores[1])))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(16, 8, generator=generator)
    return {
        "first": images + 0.1 * torch.randn(16, 8, generator=generator),
        "second": images + 0.1 * torch.randn(16, 8, generator=generator),
    }


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    both = ddp(torch.cat([shard["first"], shard["second"]]))
    scores = both.chunk(2)
    codes = [distributed_sinkhorn(view.detach(), rank.world_size) for view in scores]
    swapped((scores[0], scores[1]), (codes[0], codes[1])).backward()
