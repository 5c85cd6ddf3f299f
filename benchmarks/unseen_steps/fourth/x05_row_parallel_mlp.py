"""A reward model with tensor-parallel attention pooling and MLP, and two data-parallel replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH, HIDDEN, LENGTH = 10, 24, 5


class _EnterParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _LeaveParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RewardModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.value = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.embed(features)
        hidden = hidden + self.value(torch.sigmoid(self.gate(hidden)))
        hidden = hidden + self.down(F.silu(self.up(self.norm(hidden))))
        return self.score(hidden.mean(dim=1)).squeeze(-1)


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(chosen - rejected).mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return bradley_terry(model(batch["chosen"]), model(batch["rejected"]))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "chosen": torch.randn(12, LENGTH, 6, generator=generator),
        "rejected": torch.randn(12, LENGTH, 6, generator=generator),
    }


class ParallelRewardModel:
    """Runs a RewardModel with its wide layers split over a group."""

    sharded = ("gate.weight", "value.weight", "up.weight", "down.weight")

    def __init__(self, model: RewardModel, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        self.part, self.parts = dist.get_rank(group), dist.get_world_size(group)

    def column(self, layer: nn.Linear, hidden: Tensor) -> Tensor:
        return F.linear(hidden, layer.weight.chunk(self.parts, dim=0)[self.part])

    def row(self, layer: nn.Linear, hidden: Tensor) -> Tensor:
        return F.linear(hidden, layer.weight.chunk(self.parts, dim=1)[self.part])

    def gated(self, hidden: Tensor) -> Tensor:
        inner = _EnterParallelRegion.apply(hidden, self.group)
        partial = self.row(self.model.value, torch.sigmoid(self.column(self.model.gate, inner)))
        return hidden + _LeaveParallelRegion.apply(partial, self.group)

    def mlp(self, hidden: Tensor) -> Tensor:
        inner = _EnterParallelRegion.apply(self.model.norm(hidden), self.group)
        partial = self.row(self.model.down, F.silu(self.column(self.model.up, inner)))
        return hidden + dist_nn.all_reduce(partial, group=self.group)

    def __call__(self, features: Tensor) -> Tensor:
        hidden = self.mlp(self.gated(self.model.embed(features)))
        return self.model.score(hidden.mean(dim=1)).squeeze(-1)


case = Case(model=RewardModel, batch=make_batch, loss=loss, layout="2x2", shards="own")


def step(model: RewardModel, shard: dict[str, Tensor], rank) -> None:
    mesh = torch.arange(rank.world_size).view(rank.nodes, rank.local_world_size)
    groups = [dist.new_group(row) for row in mesh.tolist()]
    parallel = ParallelRewardModel(model, groups[rank.node])
    mine = {name: value.chunk(rank.nodes)[rank.node] for name, value in shard.items()}
    loss(parallel, mine).backward()
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.nodes if name in parallel.sharded else rank.world_size
