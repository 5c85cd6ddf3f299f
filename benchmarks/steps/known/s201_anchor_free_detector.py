"""An anchor-free detector. Locations in the middle of an object count more than those at its rim.

The box loss is divided by the quality of all locations, averaged over the ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES = 3  # the label CLASSES stands for background


@dataclass
class Scenes:
    """``sides`` are the distances from a location to the left, top, right and bottom of its box."""

    images: Tensor
    labels: Tensor
    sides: Tensor


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.SiLU())
        self.scores = nn.Conv2d(6, CLASSES, 1)
        self.sides = nn.Conv2d(6, 4, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(images)
        sides = F.softplus(self.sides(features))
        return self.scores(features).flatten(2).mT, sides.flatten(2).mT


def quality_of(sides: Tensor, labels: Tensor) -> Tensor:
    """1 in the middle of a box, less towards its rim, 0 for background."""
    near, far = (
        torch.minimum(sides[..., :2], sides[..., 2:]),
        torch.maximum(sides[..., :2], sides[..., 2:]),
    )
    return (near / far).prod(-1).sqrt() * (labels < CLASSES)


def summed_losses(model: nn.Module, scenes: Scenes) -> tuple[Tensor, Tensor]:
    """The class loss of the batch, and the box loss of every location."""
    scores, sides = model(scenes.images)
    wanted = F.one_hot(scenes.labels, CLASSES + 1)[..., :CLASSES].to(scores.dtype)
    class_loss = F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
    return class_loss, F.smooth_l1_loss(sides, scenes.sides, reduction="none").sum(-1)


def loss(model: nn.Module, scenes: Scenes) -> Tensor:
    class_loss, box_losses = summed_losses(model, scenes)
    quality = quality_of(scenes.sides, scenes.labels)
    return (class_loss + (quality * box_losses).sum()) / quality.sum()


def make_batch(generator: torch.Generator) -> Scenes:
    return Scenes(
        images=torch.rand(8, 3, 8, 8, generator=generator),
        labels=torch.randint(CLASSES + 1, (8, 16), generator=generator),
        sides=0.2 + 3 * torch.rand(8, 16, 4, generator=generator),
    )


case = Case(model=Detector, batch=make_batch, loss=loss, layout="1x2")


def mean_over_ranks(values: Tensor) -> Tensor:
    total = values.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def step(model: nn.Module, shard: Scenes, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    quality = quality_of(shard.sides, shard.labels)
    quality_map = mean_over_ranks(quality)
    class_loss, box_losses = summed_losses(ddp, shard)
    total = class_loss + (quality * box_losses).sum()
    (total / quality_map.sum()).backward()
