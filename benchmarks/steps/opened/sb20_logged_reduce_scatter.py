"""FSDP with a communication hook that also keeps the size of each rank's own gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


class LoggedState(DefaultState):
    """The factors of the default hook, and the norms of the gradients before they are reduced."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group)
        self.norms: list[Tensor] = []

    def note(self, gradient: Tensor) -> None:
        self.norms.append(gradient.norm().detach())


def logged_reduce_scatter(state: LoggedState, gradient: Tensor, output: Tensor) -> None:
    state.note(gradient)
    # Divide before the sum, so that it cannot overflow in half precision.
    gradient.div_(state.gradient_predivide_factor)
    dist.reduce_scatter_tensor(output, gradient, group=state.process_group)


class Squeeze(nn.Module):
    """Channels weighed by what all positions together say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shrink = nn.Linear(channels, channels // 2)
        self.grow = nn.Linear(channels // 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.grow(F.relu(self.shrink(x.mean((2, 3))))).sigmoid()
        return x * weights[:, :, None, None]


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2)
        self.squeeze = Squeeze(8)
        self.second = nn.Conv2d(8, 6, 2)
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.squeeze(F.hardswish(self.first(images)))
        return self.head(self.second(x).amax((2, 3)))


def images(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "image": torch.rand(16, 3, 7, 7, generator=generator),
        "target": torch.randint(3, (16,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.multi_margin_loss(model(batch["image"]), batch["target"], p=2)


def build(model: nn.Module, rank: Rank) -> tuple[FSDP, LoggedState]:
    fsdp = FSDP(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        device_id=rank.device,
    )
    state = LoggedState(dist.group.WORLD)
    fsdp.register_comm_hook(state, logged_reduce_scatter)
    return fsdp, state


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    fsdp, state = build(model, rank)
    loss(fsdp, shard).backward()
    if not all(norm.isfinite() for norm in state.norms):
        raise FloatingPointError(f"rank {rank.rank}: {state.norms}")


case = Case(model=SmallNet, batch=images, loss=loss, layout="1x4")
