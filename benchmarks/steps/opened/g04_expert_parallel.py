"""Top-1 mixture of experts, one expert per rank; tokens travel by gathering, outputs by summing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class MoE:
    experts: int = 2
    width: int = 6
    hidden: int = 9
    tokens: int = 16


moe = MoE()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, moe.width)
        self.router = nn.Linear(moe.width, moe.experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(moe.width, moe.hidden), nn.SiLU(), nn.Linear(moe.hidden, moe.width))
            for _ in range(moe.experts)
        )
        self.out = nn.Linear(moe.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        gate, where = self.router(h).softmax(-1).max(-1)
        y = sum(e(h) * (where == i)[:, None] for i, e in enumerate(self.experts))
        return self.out(h + gate[:, None] * y).squeeze(-1)


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.rows :][: ctx.rows]


class CombineOutputs(torch.autograd.Function):
    """Sums what all experts made of all tokens, and keeps the rows of this rank."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


def parallel_forward(model: Layer, x: Tensor, mine: int) -> Tensor:
    h = model.embed(x)
    gate, where = model.router(h).softmax(-1).max(-1)
    everyone = GatherTokens.apply(h)
    routed = [torch.empty_like(where) for _ in range(dist.get_world_size())]
    dist.all_gather(routed, where)
    y = model.experts[mine](everyone) * (torch.cat(routed) == mine)[:, None]
    return model.out(h + gate[:, None] * CombineOutputs.apply(y)).squeeze(-1)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(moe.tokens, 5, generator=generator), "y": torch.randn(moe.tokens, generator=generator)}


case = Case(model=Layer, batch=make_batch, loss=lambda m, b: (m(b["x"]) - b["y"]).pow(2).mean(), layout="1x2")


def step(model: Layer, shard: dict[str, Tensor], rank: Rank) -> None:
    me, world = dist.get_rank(), dist.get_world_size()
    (parallel_forward(model, shard["x"], me) - shard["y"]).pow(2).mean().backward()
    for name, p in model.named_parameters():
        if name.startswith("experts."):
            # Only the owner has seen this expert's tokens, and it has seen those of all ranks.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.broadcast(p.grad, src=int(name.split(".")[1]))
        else:
            dist.all_reduce(p.grad)
            p.grad /= world
