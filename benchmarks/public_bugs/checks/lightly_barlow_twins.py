"""The loss of Barlow Twins in lightly, with the examples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))


def two_views(generator: torch.Generator) -> Batch:
    rows = torch.randn(8, 7, generator=generator)
    return {"first": rows, "second": rows + torch.randn(8, 7, generator=generator)}


def criterion() -> Any:
    """Declares what torchvision lacks where it was built for another build of torch."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        vars(torch)["operators_of_torchvision"] = operators  # declared as long as this lives
    from lightly.loss import BarlowTwinsLoss

    return BarlowTwinsLoss(gather_distributed=True)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = criterion()(model(batch["first"]), model(batch["second"]))
    return value


case = Case(model=build_model, batch=two_views, loss=loss, layout="1x2")
options = {"allow_changes": True}  # lightly sets a variable


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
