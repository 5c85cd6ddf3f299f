"""A training loop with Hugging Face Accelerate, as a step for ``check(..., compare="update")``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

from ddp_equivalence.adapters import MakeOptimizer, Rows, micro_batch_size, plain_sgd, trainers_room
from ddp_equivalence.ranks.rank import Rank

Loop = Callable[[Accelerator, nn.Module, Any, Any], object]
"""Trains on everything that the loader yields: (accelerator, model, optimizer, loader)."""


def accelerate_step(
    loop: Loop,
    *,
    steps: int = 1,
    optimizer: MakeOptimizer = plain_sgd,
    batch_size: int | None = None,
    shuffle: bool = False,
    **settings: Any,
) -> Callable[[nn.Module, Any, Rank], None]:
    """A step that gives ``loop`` an Accelerator, and what it has prepared.

    ``settings``: arguments of ``Accelerator``, such as ``gradient_accumulation_steps``.
    ``batch_size``: of one rank's loader; the default divides the examples into ``steps`` steps.
    """
    accumulation = settings.get("gradient_accumulation_steps", 1)

    def step(model: nn.Module, whole: Any, rank: Rank) -> None:
        rows = Rows(whole)
        size = batch_size or micro_batch_size(len(rows), rank, steps, accumulation)
        loader = DataLoader(rows, batch_size=size, shuffle=shuffle)
        with trainers_room(rank):
            forget_earlier_accelerators()
            try:
                accelerator = Accelerator(cpu=rank.device.type == "cpu", **settings)
                optimizer_of_model = optimizer(list(model.parameters()))
                loop(accelerator, *accelerator.prepare(model, optimizer_of_model, loader))
            finally:
                forget_earlier_accelerators()

    return step


def forget_earlier_accelerators() -> None:
    """Reset Accelerate's global state, which would hand its settings on to the next case."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
