"""Heartbeats are classified from short recordings; reduction starts as soon as gradients are there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

LEADS, SAMPLES, RHYTHMS, MICRO_BATCH = 2, 20, 4, 3


class Residual(nn.Module):
    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.gate = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x)) * torch.sigmoid(self.gate(x))


class BeatNet(nn.Module):
    def __init__(self, width: int = 6):
        super().__init__()
        self.enter = nn.Conv1d(LEADS, width, 5, padding=2)
        self.blocks = nn.Sequential(*(Residual(width, 2**level) for level in range(2)))
        self.classify = nn.Linear(width, RHYTHMS)

    def forward(self, recording: Tensor) -> Tensor:
        return self.classify(self.blocks(self.enter(recording)).mean(dim=2))


def focal(logits: Tensor, rhythm: Tensor, gamma: float = 1.5) -> Tensor:
    """Of each recording: those that are classified well already count little."""
    surprise = F.cross_entropy(logits, rhythm, reduction="none")
    return (1 - torch.exp(-surprise)).pow(gamma) * surprise


def loss(model: nn.Module, batch: dict) -> Tensor:
    return focal(model(batch["recording"]), batch["rhythm"]).mean()


def recordings(generator: torch.Generator) -> dict:
    return {
        "recording": torch.randn(24, LEADS, SAMPLES, generator=generator),
        "rhythm": torch.randint(0, RHYTHMS, (24,), generator=generator),
    }


case = Case(model=BeatNet, batch=recordings, loss=loss, layout="1x2")


class OverlappedReduction:
    """Sums the gradient of each parameter over the ranks while backward still runs."""

    def __init__(self, model: nn.Module, micro_batches: int):
        self.left = micro_batches  # that backward has not begun with
        self.works: list[dist.Work] = []
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self.ready)
            for parameter in model.parameters()
        ]

    def ready(self, parameter: nn.Parameter) -> None:
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def backward(self, objective: Tensor) -> None:
        self.left -= 1
        objective.backward()
        self.finish()

    def finish(self) -> None:
        while self.works:
            self.works.pop().wait()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def step(model: nn.Module, shard: dict, rank) -> None:
    recording, rhythm = shard["recording"], shard["rhythm"]
    examples = len(rhythm) * rank.world_size
    micro = list(zip(recording.split(MICRO_BATCH), rhythm.split(MICRO_BATCH)))
    reduction = OverlappedReduction(model, len(micro))
    for some, labels in micro:
        reduction.backward(focal(model(some), labels).sum() / examples)
    reduction.close()
