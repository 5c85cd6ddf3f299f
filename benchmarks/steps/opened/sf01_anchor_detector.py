"""A one-stage detector: focal loss on the anchors, box regression on the positive ones.

The feature levels and the two heads are sharded one by one, so that only one of them is whole at a time.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

IMAGES, CHANNELS, LEVELS, ANCHORS = 12, 10, 3, 9


class Level(nn.Module):
    """One level of the pyramid: a residual block and a projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(Level(CHANNELS) for _ in range(LEVELS))
        self.scores = nn.Linear(CHANNELS, 1)
        self.boxes = nn.Linear(CHANNELS, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for level in self.levels:
            x = level(x)
        return self.scores(x).squeeze(-1), self.boxes(x)


def images(generator: torch.Generator) -> dict[str, Tensor]:
    positive = torch.rand(IMAGES, ANCHORS, generator=generator) < 0.35
    return {
        "features": torch.randn(IMAGES, ANCHORS, CHANNELS, generator=generator),
        "positive": positive.double(),
        "boxes": torch.randn(IMAGES, ANCHORS, 4, generator=generator),
    }


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0, alpha: float = 0.25) -> Tensor:
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    p_t = p * labels + (1 - p) * (1 - labels)
    weight = alpha * labels + (1 - alpha) * (1 - labels)
    return (weight * (1 - p_t) ** gamma * ce).sum()


def detection_loss(model: nn.Module, batch: dict[str, Tensor], normaliser: Tensor) -> Tensor:
    scores, boxes = model(batch["features"])
    distance = F.smooth_l1_loss(boxes, batch["boxes"], reduction="none").sum(-1)
    return (focal(scores, batch["positive"]) + (distance * batch["positive"]).sum()) / normaliser


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return detection_loss(model, batch, batch["positive"].sum().clamp(min=1.0))


class Normaliser:
    """The number of positive anchors; images without objects must not blow the loss up."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    @torch.no_grad()
    def __call__(self, positive: Tensor) -> Tensor:
        count = positive.sum()
        dist.all_reduce(count, group=self.group)
        return count.clamp(min=1.0)


def shard_detector(model: Detector) -> Detector:
    for level in model.levels:
        fully_shard(level, reshard_after_forward=True)
    # Both heads are small: one group, kept whole until the backward has passed.
    fully_shard([model.scores, model.boxes], reshard_after_forward=False)
    return fully_shard(model)


def step(model, shard, rank):
    detector = shard_detector(model)
    normaliser = Normaliser()
    detection_loss(detector, shard, normaliser(shard["positive"])).backward()


case = Case(model=Detector, batch=images, loss=loss, layout="1x2")
