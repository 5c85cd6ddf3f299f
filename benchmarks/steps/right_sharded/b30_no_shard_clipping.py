"""FSDP with NO_SHARD, which is DDP in the clothes of FSDP: torch's own clipping sees it all."""

from __future__ import annotations

import enum
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from ddp_equivalence import Case, Rank

MAX_NORM = 0.15
ACCUMULATE = 2


class Sharding(enum.Enum):
    """The names that the command line knows."""

    FULL = ShardingStrategy.FULL_SHARD
    GRADIENTS = ShardingStrategy.SHARD_GRAD_OP
    NONE = ShardingStrategy.NO_SHARD

    def clip(self, model: FSDP, max_norm: float) -> Tensor:
        if self is Sharding.NONE:
            return nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
        return model.clip_grad_norm_(max_norm)


class Separable(nn.Module):
    """A depthwise and a pointwise convolution."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(inward, inward, 3, padding=1, groups=inward)
        self.point = nn.Conv2d(inward, outward, 1, bias=False)
        self.norm = nn.InstanceNorm2d(outward, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.softplus(self.norm(self.point(self.depth(x))))


def network() -> nn.Module:
    return nn.Sequential(Separable(2, 4), Separable(4, 6), nn.Flatten(), nn.Linear(6 * 25, 3))


def images(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "image": torch.randn(16, 2, 5, 5, generator=generator),
        "target": torch.rand(16, 3, generator=generator).softmax(-1),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["target"])


def wrap(model: nn.Module, sharding: Sharding, **settings: Any) -> FSDP:
    for name, module in list(model.named_children()):
        if isinstance(module, Separable):
            model.register_module(name, FSDP(module, sharding_strategy=sharding.value, **settings))
    return FSDP(model, sharding_strategy=sharding.value, **settings)


def wrapped_quietly(model: nn.Module, sharding: Sharding, rank: Rank) -> FSDP:
    """NO_SHARD is deprecated in favour of DDP, and says so once for every unit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return wrap(
            model,
            sharding,
            use_orig_params=True,
            sync_module_states=False,
            mixed_precision=MixedPrecision(),
            device_id=rank.device,
        )


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    sharding = Sharding["NONE"]
    fsdp = wrapped_quietly(model, sharding, rank)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.2)
    # Both micro-batches are reduced: the second reduction would be saved by no_sync.
    for part in range(ACCUMULATE):
        micro_batch = {name: rows.chunk(ACCUMULATE)[part] for name, rows in shard.items()}
        (loss(fsdp, micro_batch) / ACCUMULATE).backward()
    sharding.clip(fsdp, MAX_NORM)
    optimizer.step()


case = Case(model=network, batch=images, loss=loss, layout="1x2")
options = {"compare": "update", "lr": 0.2, "clip": MAX_NORM}
