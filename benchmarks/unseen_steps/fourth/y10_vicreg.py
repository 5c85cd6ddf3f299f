"""VICReg: two views of every image, whose embeddings should agree, vary, and not correlate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

IMAGES, SIZE, EMBEDDING = 16, 6, 8


@dataclass(frozen=True)
class Coefficients:
    similarity: float = 25.0
    deviation: float = 25.0
    covariance: float = 1.0


class Encoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.projector = nn.Sequential(
            nn.Linear(4 * width, 16), nn.GELU(), nn.Linear(16, EMBEDDING)
        )

    def forward(self, views: Tensor) -> Tensor:
        return self.projector(self.backbone(views))


def off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


def center(embeddings: Tensor) -> Tensor:
    return embeddings - embeddings.mean(dim=0)


def deviation_and_covariance(centered: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Penalties of embeddings whose mean is zero, `count` of which are a whole batch."""
    covariance = centered.T @ centered / (count - 1)
    deviation = (covariance.diagonal() + 1e-4).sqrt()
    return F.relu(1 - deviation).mean(), off_diagonal(covariance).pow(2).sum() / EMBEDDING


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    first, second = model(batch["first"]), model(batch["second"])
    weights = Coefficients()
    total = weights.similarity * F.mse_loss(first, second)
    for view in (first, second):
        deviation, covariance = deviation_and_covariance(center(view), len(view))
        total = total + weights.deviation * deviation / 2 + weights.covariance * covariance
    return total


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.randn(IMAGES, 1, SIZE, SIZE, generator=generator)
    noise = torch.randn(IMAGES, 1, SIZE, SIZE, generator=generator)
    return {"first": images, "second": images.flip(-1) + 0.3 * noise}


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x2")


class VICReg:
    def __init__(self, model: nn.Module) -> None:
        self.encoder = DistributedDataParallel(model)
        self.weights = Coefficients()

    @staticmethod
    def gather(embeddings: Tensor) -> Tensor:
        if dist.get_world_size() == 1:
            return embeddings
        return torch.cat(dist_fn.all_gather(embeddings))

    def regularise(self, view: Tensor) -> Tensor:
        centered = self.gather(center(view))
        deviation, covariance = deviation_and_covariance(centered, len(centered))
        return self.weights.deviation * deviation / 2 + self.weights.covariance * covariance

    def training_step(self, batch: dict[str, Tensor]) -> None:
        embeddings = self.encoder(torch.cat([batch["first"], batch["second"]]))
        first, second = embeddings.chunk(2)
        objective = self.weights.similarity * F.mse_loss(first, second)
        objective = objective + self.regularise(first) + self.regularise(second)
        objective.backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    VICReg(model).training_step(shard)
