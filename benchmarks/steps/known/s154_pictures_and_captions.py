"""Contrastive training of pictures and captions, with the pairs of all ranks as negatives."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
Features = tuple[Tensor, Tensor, Tensor]


class TwoTowers(nn.Module):
    """Unit vectors for pictures and captions, and the scale of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 6))
        self.caption = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 6))
        self.log_scale = nn.Parameter(torch.tensor(math.log(4.0)))

    def forward(self, pictures: Tensor, captions: Tensor) -> Features:
        vectors = (self.picture(pictures), self.caption(captions))
        picture, caption = (F.normalize(vector, dim=-1) for vector in vectors)
        return picture, caption, self.log_scale.exp()


def contrast(pictures: Tensor, captions: Tensor, scale: Tensor) -> Tensor:
    logits = scale * pictures @ captions.T
    pairs = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return contrast(*model(batch["pictures"], batch["captions"]))


def make_batch(generator: torch.Generator) -> Batch:
    content = torch.randn(16, 7, generator=generator)
    view = torch.randn(7, 10, generator=generator)
    return {
        "pictures": content @ view + 0.3 * torch.randn(16, 10, generator=generator),
        "captions": content,
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="2x2")


class GatherRows(torch.autograd.Function):
    """The rows of all ranks. Every rank computes the same loss from them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        first = dist.get_rank() * len(rows)
        ctx.own = slice(first, first + len(rows))
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient[ctx.own]


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    pictures, captions, scale = ddp(shard["pictures"], shard["captions"])
    contrast(GatherRows.apply(pictures), GatherRows.apply(captions), scale).backward()
