"""Fault injection: a fault breaks training on purpose, to see whether the suite names the cause."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ddp_equivalence.case.layouts import Layout

if TYPE_CHECKING:
    from ddp_equivalence.strategies.strategy import Task, TrainStep


class RecordFiring(Protocol):
    """A fault calls this each time it does its damage. A fault that never fires shows nothing."""

    def __call__(self) -> None: ...


def _leave_torch_intact(record_firing: RecordFiring) -> AbstractContextManager[Any]:
    return nullcontext()


def shows_everywhere(layout: Layout) -> None:
    """For faults that show on every layout."""


def needs_two_ranks(layout: Layout) -> str | None:
    """For faults that show wherever there are at least two ranks."""
    return "there is only one rank" if layout.world_size == 1 else None


@dataclass(frozen=True)
class Fault:
    """One fault. The diagnosis must find its ``cause``, which its name is if no other is given.

    A fault breaks torch, or it replaces the train step. ``FAULTS`` finds each ``Fault``
    that a module of this package makes. The fields after ``why_it_cannot_show`` say where the
    suite plants the fault: in which strategies, with which pairs of model and loss, and so on.
    """

    name: str
    sentence: str
    """One sentence for users: what is broken, and where."""
    break_torch: Callable[[RecordFiring], AbstractContextManager[Any]] = _leave_torch_intact
    """Breaks torch in this process until its block ends, for all code that runs in the block."""
    break_step: Callable[[Task, TrainStep, RecordFiring], TrainStep] | None = None
    """Makes a broken train step from the right one, for a fault that lies in the step itself."""
    why_it_cannot_show: Callable[[Layout], str | None] = needs_two_ranks
    """The reason why the fault cannot change gradients on a layout; None if it can."""
    strategies: tuple[str, ...] = ("ddp_mean", "ddp_global_mean")
    pairs: tuple[tuple[str, str], ...] = (
        ("mlp", "mse_mean"),
        ("conv", "cross_entropy_mean"),
        ("gru_tied", "token_mean"),
        ("mlp", "two_normalisers"),
    )
    shards: tuple[str, ...] = ("equal",)
    steps: int = 1
    """The number of big batches, one for each step."""
    extra_examples: int = 0
    """The number of examples by which the big batch exceeds a multiple of the number of ranks."""
    needs_unequal_divisors: bool = False
    """The fault shows only where the losses of the ranks divide by different numbers."""
    strategy_differs_anyway: bool = False
    """The strategy differs without the fault too: the cause lies in the model, loss or data."""
    own_step: str = "with_ddp"
    """The step in commands/own_steps.py that the fault is also planted in; "" if its damage
    is done in no line of such a step."""
    acts_at: tuple[str, ...] = ("wrap", "backward")
    """The lines of that step at which the fault acts: a report must point at one of them."""
    cause: str = ""
    """The cause that the diagnosis must find; that of the fault's name by default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", self.cause or self.name)
