"""A speech encoder whose stages are recomputed in the backward, and sharded after that."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

FRAMES, MELS, WIDTH, SPEAKERS = 8, 6, 9, 5


class Stage(nn.Module):
    """A depthwise-separable convolution over time, shortcut where the width stays."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.depth = nn.Conv1d(inputs, inputs, kernel_size=3, padding=1, groups=inputs)
        self.point = nn.Conv1d(inputs, outputs, kernel_size=1)
        self.same = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.point(self.depth(x)))
        return x + y if self.same else y


class SpeakerEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = Stage(MELS, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(WIDTH, FRAMES))
        self.stages = nn.ModuleList(Stage(WIDTH, WIDTH) for _ in range(2))
        self.speakers = nn.Linear(WIDTH, SPEAKERS)

    def forward(self, mels: Tensor) -> Tensor:
        x = self.front(mels) + self.position
        for stage in self.stages:
            x = stage(x)
        return self.speakers(x.mean(dim=-1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["mels"]), batch["speaker"])


def voices(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "mels": torch.randn(12, MELS, FRAMES, generator=generator),
        "speaker": torch.randint(SPEAKERS, (12,), generator=generator),
    }


def recompute(model: nn.Module) -> None:
    """Wrap every stage; the head is too small to be worth it."""
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper,
        check_fn=lambda module: isinstance(module, Stage),
    )


def shard_stages(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, CheckpointWrapper):
            fully_shard(module)
    return fully_shard(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if gradient is not None else torch.zeros(parameter.shape)
        found[name.replace("_checkpoint_wrapped_module.", "")] = whole.to(parameter.dtype)
    return found


def step(model, shard, rank):
    recompute(model)
    encoder = shard_stages(model)
    loss(encoder, shard).backward()
    return gradients(encoder)


case = Case(model=SpeakerEncoder, batch=voices, loss=loss, layout="1x2")
