"""A fault: a known cause, planted on purpose, so that it can be seen to be caught and named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ddp_equivalence.case.layouts import Layout

if TYPE_CHECKING:
    from ddp_equivalence.strategies.strategy import Task, TrainStep


class Fire(Protocol):
    """Called each time that the damage is done: a plant that never fires shows nothing."""

    def __call__(self) -> None: ...


def _intact(fire: Fire) -> AbstractContextManager[Any]:
    return nullcontext()


def _one_rank(layout: Layout) -> str | None:
    return "there is one rank alone" if layout.world_size == 1 else None


@dataclass(frozen=True)
class Fault:
    """One fault, named like the diagnosis that must catch it.

    ``sentence``: what is broken, and where. ``in_torch(fire)``: breaks torch in this process while
    the block lasts, so that any code that runs in it is concerned. ``in_step(task, step, fire)``: a
    broken train step instead, where the fault is one of the step itself. ``hidden(layout)``: why
    it cannot show on this layout, None if it can. ``strategies``: those in which it is planted by
    the suite. ``pairs``: models and losses that it is met on; ``shards``: deals, ``steps``: big
    batches.
    """

    name: str
    sentence: str
    in_torch: Callable[[Fire], AbstractContextManager[Any]] = _intact
    in_step: Callable[[Task, TrainStep, Fire], TrainStep] | None = None
    hidden: Callable[[Layout], str | None] = _one_rank
    strategies: tuple[str, ...] = ("ddp_mean", "ddp_global_mean")
    pairs: tuple[tuple[str, str], ...] = (
        ("mlp", "mse_mean"),
        ("conv", "cross_entropy_mean"),
        ("gru_tied", "token_mean"),
        ("mlp", "two_normalisers"),
    )
    shards: tuple[str, ...] = ("equal",)
    steps: int = 1
    extra_examples: int = 0
    """Examples in the big batch beyond what the ranks divide evenly."""
    of_counts: bool = False
    """It shows only where the ranks' losses divide by different numbers."""
    by_design: bool = False
    """The strategy differs without the plant too: the fault is in model, loss or data."""
