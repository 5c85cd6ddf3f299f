"""Swapped prediction of cluster assignments, which Sinkhorn iterations balance over the batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

IMAGES, PIXELS, EMBEDDING, PROTOTYPES = 16, 10, 6, 5
TEMPERATURE, EPSILON, ITERATIONS = 0.4, 0.25, 3

Batch = dict[str, Tensor]


class SwAV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 14), nn.GELU(), nn.Linear(14, EMBEDDING))
        self.prototypes = nn.Linear(EMBEDDING, PROTOTYPES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.prototypes(F.normalize(self.encoder(images), dim=1))


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def reduce_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks."""
    if not is_distributed():
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    """Assignments (examples, prototypes) with equally much mass on every prototype."""
    assignments = (scores / EPSILON).exp().T
    assignments /= reduce_sum(assignments.sum())
    for _ in range(ITERATIONS):
        mass = assignments.sum(dim=1, keepdim=True)
        reduce_sum(mass)
        assignments /= mass
        assignments /= PROTOTYPES
        assignments /= assignments.sum(dim=0, keepdim=True)
    return assignments.T


def swapped_prediction(scores: list[Tensor]) -> Tensor:
    """Every view predicts the assignment of the other."""
    total = scores[0].new_zeros(())
    for view, other in ((0, 1), (1, 0)):
        codes = sinkhorn(scores[other].detach())
        total = total + F.cross_entropy(scores[view] / TEMPERATURE, codes)
    return total / 2


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return swapped_prediction([model(batch["first"]), model(batch["second"])])


def make_batch(generator: torch.Generator) -> Batch:
    images = torch.randn(IMAGES, PIXELS, generator=generator)
    noise = torch.randn(2, IMAGES, PIXELS, generator=generator)
    return {"first": images + 0.5 * noise[0], "second": images + 0.5 * noise[1]}


case = Case(model=SwAV, batch=make_batch, loss=loss, layout="2x2")


class SelfSupervisedTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = DistributedDataParallel(model)

    def train_step(self, batch: Batch) -> float:
        scores = self.model(torch.cat([batch["first"], batch["second"]]))
        objective = swapped_prediction(list(scores.chunk(2)))
        objective.backward()
        return objective.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    SelfSupervisedTrainer(model).train_step(shard)
