"""A cascade of box heads on shared features; every head sends back its share of the gradient."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

STAGES = 3

Batch = dict[str, Tensor]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8 + 4, 10)
        self.change = nn.Linear(10, 4)

    def forward(self, features: Tensor, boxes: Tensor) -> Tensor:
        hidden = torch.relu(self.hidden(torch.cat([features, boxes], dim=-1)))
        return boxes + self.change(hidden)


class Cascade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(9, 8), nn.Tanh())
        self.heads = nn.ModuleList([Head() for _ in range(STAGES)])

    def forward(self, image: Tensor, boxes: Tensor) -> list[Tensor]:
        features = self.backbone(image)
        results = []
        for head in self.heads:
            boxes = head(features, boxes.detach())
            results.append(boxes)
        return results


def box_loss(results: list[Tensor], truth: Tensor) -> Tensor:
    return torch.stack([F.smooth_l1_loss(boxes, truth) for boxes in results]).sum()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The backbone learns from the mean of the stages, and each head from its own stage."""
    features, boxes = model.backbone(batch["image"]), batch["boxes"]
    shared = features / STAGES + (features * (1 - 1 / STAGES)).detach()
    results = []
    for head in model.heads:
        boxes = head(shared, boxes.detach())
        results.append(boxes)
    return box_loss(results, batch["truth"])


def make_batch(generator: torch.Generator) -> Batch:
    sizes = {"image": 9, "boxes": 4, "truth": 4}
    return {name: torch.randn(12, size, generator=generator) for name, size in sizes.items()}


case = Case(model=Cascade, batch=make_batch, loss=loss, layout="1x2")


class GradientShare:
    """Divides what a head sends back to the features by the number of heads."""

    def __init__(self, heads: nn.ModuleList) -> None:
        self.count = len(heads)
        for head in heads:
            head.register_forward_pre_hook(self.before_head)

    def before_head(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        features = inputs[0]
        features.register_hook(lambda gradient: gradient / self.count)
        return (features, *inputs[1:])


def step(model: Cascade, shard: Batch, rank: Rank) -> None:
    GradientShare(model.heads)
    ddp = DistributedDataParallel(model)
    box_loss(ddp(shard["image"], shard["boxes"]), shard["truth"]).backward()
