"""AdamW, a warm-up, clipping by torch's own function, and recomputed activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from ddp_equivalence import Case

STEPS, MAX_NORM, WARM_UP = 3, 0.3, 2


class PreNorm(nn.Module):
    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Mixer(nn.Module):
    """Mixes over patches, then over channels."""

    def __init__(self, patches: int = 4, channels: int = 6) -> None:
        super().__init__()
        self.over_patches = PreNorm(patches, nn.Linear(patches, patches))
        self.over_channels = PreNorm(
            channels, nn.Sequential(nn.Linear(channels, 15), nn.GELU(), nn.Linear(15, channels))
        )
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.over_patches(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.over_channels(x).mean(dim=1))


def make_optimizer(parameters) -> list:
    optimizer = torch.optim.AdamW(
        parameters, lr=0.02, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1
    )
    schedule = LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / (WARM_UP + 1)))
    return [optimizer, schedule]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["patches"]), batch["kind"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    patches = torch.randn(12 * STEPS, 4, 6, generator=generator)
    return {"patches": patches, "kind": patches.mean(dim=1)[:, :3].argmax(dim=1)}


def prepare(model: Mixer) -> nn.Module:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(
            module, checkpoint_impl=CheckpointImpl.NO_REENTRANT
        ),
        check_fn=lambda module: isinstance(module, PreNorm),
    )
    fully_shard(model.over_patches)
    fully_shard(model.over_channels)
    return fully_shard(model)


def step(model: Mixer, shard: dict[str, Tensor], rank) -> None:
    sharded = prepare(model)
    optimizer, schedule = make_optimizer(sharded.parameters())
    for patches, kind in zip(shard["patches"].chunk(STEPS), shard["kind"].chunk(STEPS)):
        loss(sharded, {"patches": patches, "kind": kind}).backward()
        norm = nn.utils.clip_grad_norm_(sharded.parameters(), MAX_NORM)
        assert isinstance(norm, DTensor) and norm.full_tensor() > 0
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


case = Case(model=Mixer, batch=make_batch, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": STEPS}
