"""Supervised contrast: examples of one class attract each other, over all ranks.

Each rank has its own examples as anchors, and compares them with the examples of all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

TEMPERATURE = 0.4


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(2, 6, 3), nn.GELU(), nn.Conv1d(6, 6, 3))
        self.project = nn.Linear(6, 5)

    def forward(self, signals: Tensor) -> Tensor:
        return F.normalize(self.project(self.features(signals).mean(dim=2)), dim=1)


def first_row(rows: int) -> int:
    """Where this rank's rows begin among those of all ranks."""
    return dist.get_rank() * rows if dist.is_initialized() else 0


class GatherRows(Function):
    """The rows of all ranks. In the backward pass the gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        grad = grad_outputs[0].contiguous()
        dist.all_reduce(grad)
        start = first_row(ctx.rows)
        return grad[start : start + ctx.rows]


def attraction(anchors: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor) -> Tensor:
    """The mean over anchors of the loss against all other rows."""
    same = labels[:, None] == row_labels[None, :]
    others = torch.ones_like(same).fill_diagonal_(False)
    scores = (anchors @ rows.T / TEMPERATURE).masked_fill(~others, -1e9)
    log_p = scores.log_softmax(dim=1)
    positive = (same & others).to(log_p.dtype)
    return -((positive * log_p).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    anchors = model(batch["signals"])
    return attraction(anchors, batch["label"], anchors, batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "signals": torch.randn(16, 2, 9, generator=generator),
        "label": torch.randint(3, (16,), generator=generator),
    }


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x4")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    anchors = ddp(shard["signals"])
    row_labels = [torch.empty_like(shard["label"]) for _ in range(rank.world_size)]
    dist.all_gather(row_labels, shard["label"])
    rows = GatherRows.apply(anchors)
    attraction(anchors, shard["label"], rows, torch.cat(row_labels)).backward()
