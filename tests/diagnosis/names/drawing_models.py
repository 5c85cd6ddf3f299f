"""Models and losses that draw random numbers, each in its own way, and ranks that draw others.

A GPU draws other numbers than the CPU, where the big batch is computed. ``another_device`` does
the same on the CPU: what runs inside draws from a generator of its own, and the states of the
generators that everybody knows stay as they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Rank
from tests.diagnosis.names.small_case import Loss, Step, average
from tests.package.own_cases import loss as squares


class Layers(nn.Module):
    """Three linear layers. A subclass draws, or couples examples, between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(5, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Any:
        hidden = self.changed(torch.tanh(self.first(rows)))
        return self.last(hidden + torch.tanh(self.middle(hidden)))

    def changed(self, hidden: Tensor) -> Tensor:
        return hidden


class Centred(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class FunctionalDropout(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.3, training=True)


class OneScaleForAll(Layers):
    """Draws numbers for all examples at once, as a random projection is drawn."""

    def changed(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + torch.rand(hidden.shape[1], dtype=hidden.dtype))


class PythonsDepth(Layers):
    """Stochastic depth with the generator of Python's module random."""

    def forward(self, rows: Tensor) -> Any:
        hidden = torch.tanh(self.first(rows))
        kept = hidden.new_tensor([[float(random.random() < 0.7)] for _ in rows])
        return self.last(hidden + kept * torch.tanh(self.middle(hidden)) / 0.7)


class Latent(Layers):
    """The noise of a variational autoencoder."""

    def changed(self, hidden: Tensor) -> Tensor:
        return hidden + torch.exp(hidden / 2) * torch.randn_like(hidden)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Any:
        tokens = torch.stack([rows[:, :4], rows[:, 1:], rows[:, :4] * 2], dim=1)
        return self.last(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def denoised(model: nn.Module, batch: Any) -> Tensor:
    """A loss of a diffusion model, with random timesteps."""
    rows = batch["rows"]
    angle = torch.randint(0, 100, (len(rows), 1)) / 100 * math.pi / 2
    noise = torch.randn_like(rows)
    noisy = torch.cos(angle).to(rows.dtype) * rows + torch.sin(angle).to(rows.dtype) * noise
    return F.mse_loss(model(noisy), noise[:, :3])


class AnotherDevice(TorchDispatchMode):
    """What draws inside the block draws from a stream of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **(kwargs or {}))
        of_cpu = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(of_cpu)


def another_device(rank: Rank) -> AbstractContextManager[object]:
    return AnotherDevice(100 + rank.rank)


def on_the_cpu(rank: Rank) -> AbstractContextManager[object]:
    return nullcontext()


class ModuleDropout(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def changed(self, hidden: Tensor) -> Tensor:
        return self.drop(hidden)  # type: ignore[no-any-return]


class GeneratorOfTheRank(Layers):
    """Draws from a generator that is seeded by rank and device."""

    def changed(self, hidden: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 50
        generator = torch.Generator(hidden.device).manual_seed(1_000 + rank)
        noise = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
        return hidden + 0.3 * noise


class Checkpointed(Layers):
    """Draws its mask again in the backward pass."""

    def changed(self, hidden: Tensor) -> Tensor:
        return checkpoint(lambda one: F.dropout(one, 0.3), hidden, use_reentrant=False)  # type: ignore[no-any-return]


def noisy_squares(model: nn.Module, batch: Any) -> Tensor:
    """Noise that the loss draws."""
    outputs = model(batch["rows"])
    return F.mse_loss(outputs + 0.3 * torch.randn_like(outputs), batch["targets"])


DRAWING: list[tuple[Any, Loss]] = [
    *((model, squares) for model in (FunctionalDropout, PythonsDepth, Latent, Attention)),
    *((model, squares) for model in (ModuleDropout, GeneratorOfTheRank, Checkpointed)),
    (Layers, noisy_squares),
    (Layers, denoised),
]

Device = Callable[[Rank], AbstractContextManager[object]]


def right(loss: Loss, device: Device) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        with device(rank):
            loss(model, shard).backward()
        average(model, rank.world_size)

    return step


def sums(loss: Loss, device: Device) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        with device(rank):
            loss(model, shard).backward()
        average(model, 1)

    return step


def leaves_out_rank_1(loss: Loss, device: Device) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        with device(rank):
            loss(model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= rank.rank != 1
        average(model, rank.world_size)

    return step


def keeps_the_last_micro_batch(loss: Loss, device: Device) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        middle = len(shard["rows"]) // 2
        with device(rank):
            for half in (slice(None, middle), slice(middle, None)):
                model.zero_grad()
                (loss(model, {name: leaf[half] for name, leaf in shard.items()}) / 2).backward()
        average(model, rank.world_size)

    return step
