"""FSDP units with checkpoint wrappers put inside of them afterwards, and a frozen stem."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from ddp_equivalence import Case, Rank


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norms[1](x))


class Patches(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, stride=2).requires_grad_(False)
        self.position = nn.Parameter(0.1 * torch.randn(1, 9, width))
        self.encoder = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(depth)))
        self.regress = nn.Linear(width, 2)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.stem(images).flatten(2).mT
        return self.regress(self.encoder(patches + self.position).mean(1))


Wrapper = Callable[[nn.Module], nn.Module]


def sharded(model: nn.Module, rank: Rank) -> FSDP:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={EncoderLayer})
    return FSDP(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        cpu_offload=CPUOffload(offload_params=False),
        use_orig_params=True,
        device_id=rank.device,
    )


def with_recomputation(model: nn.Module) -> nn.Module:
    wrap: Wrapper = functools.partial(
        checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrap,
        check_fn=lambda module: isinstance(module, EncoderLayer),
    )
    return model


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    images = torch.rand(16, 1, 6, 6, generator=generator)
    moments = torch.stack([images.mean((1, 2, 3)), images.std((1, 2, 3))], dim=1)
    return {"images": images, "moments": moments}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["images"]), 3 * batch["moments"])


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    loss(with_recomputation(sharded(model, rank)), shard).backward()


case = Case(model=Patches, batch=pictures, loss=loss, layout="1x4")
