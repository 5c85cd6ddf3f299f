"""A dense detector: all losses are divided by the positive anchors, averaged over the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

ANCHORS = 6
OBJECTS = [1, 2, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0]
BOX_WEIGHT = 2.0

Batch = dict[str, Tensor]


class AnchorHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(9, 14), nn.Tanh())
        self.score = nn.Linear(14, ANCHORS)
        self.delta = nn.Linear(14, ANCHORS * 4)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        features = self.stem(image)
        return self.score(features), self.delta(features).unflatten(-1, (ANCHORS, 4))


def focal(scores: Tensor, positive: Tensor) -> Tensor:
    target = positive.to(scores.dtype)
    missing = (scores.sigmoid() - target).abs()
    return missing.square() * F.binary_cross_entropy_with_logits(scores, target, reduction="none")


def weighted_sum(scores: Tensor, deltas: Tensor, batch: Batch) -> Tensor:
    positive = batch["positive"]
    boxes = F.smooth_l1_loss(deltas[positive], batch["delta"][positive], reduction="sum")
    return focal(scores, positive).sum() + BOX_WEIGHT * boxes


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return weighted_sum(*model(batch["image"]), batch) / batch["positive"].sum().clamp(min=1)


def make_batch(generator: torch.Generator) -> Batch:
    count = len(OBJECTS)
    return {
        "image": torch.randn(count, 9, generator=generator),
        "positive": torch.arange(ANCHORS) < torch.tensor(OBJECTS)[:, None],
        "delta": torch.randn(count, ANCHORS, 4, generator=generator),
    }


case = Case(model=AnchorHead, batch=make_batch, loss=loss, layout="1x2")


def reduce_mean(value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value.div_(dist.get_world_size()))
    return value


class DenseDetector:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)

    def average_factor(self, batch: Batch) -> Tensor:
        found = batch["positive"].sum().to(batch["image"].dtype)
        return reduce_mean(found.clamp(min=1))

    def train_step(self, batch: Batch) -> dict[str, float]:
        scores, deltas = self.ddp(batch["image"])
        factor = self.average_factor(batch)
        value = weighted_sum(scores, deltas, batch) / factor
        value.backward()
        return {"loss": value.item(), "positives": factor.item()}


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    DenseDetector(model).train_step(shard)
