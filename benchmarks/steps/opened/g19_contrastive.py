"""Text-image retrieval: each rank scores its own rows against the keys of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclass
class ClipCfg:
    text: int = 6
    image: int = 8
    shared: int = 5
    temperature: float = 0.2


cfg = ClipCfg()


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(cfg.text, 9), nn.GELU(), nn.Linear(9, cfg.shared))
        self.image = nn.Linear(cfg.image, cfg.shared)

    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.text(text), dim=-1), F.normalize(self.image(image), dim=-1)


def pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "text": torch.randn(8, cfg.text, generator=generator),
        "image": torch.randn(8, cfg.image, generator=generator),
    }


def info_nce(queries: Tensor, keys: Tensor, first: int = 0) -> Tensor:
    """Row i of the queries belongs to key ``first + i``."""
    target = first + torch.arange(len(queries))
    return F.cross_entropy(queries @ keys.T / cfg.temperature, target)


def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
    t, i = model(b["text"], b["image"])
    return (info_nce(t, i) + info_nce(i, t)) / 2


case = Case(model=Towers, batch=pairs, loss=loss, layout="2x2")


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.n = len(x)
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        mine = total.narrow(0, ctx.n * dist.get_rank(), ctx.n)
        return mine / dist.get_world_size()


def gather(x: Tensor) -> Tensor:
    return AllGather.apply(x)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    t, i = ddp(shard["text"], shard["image"])
    first = dist.get_rank() * len(t)
    ((info_nce(t, gather(i), first) + info_nce(i, gather(t), first)) / 2).backward()
