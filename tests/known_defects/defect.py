"""What is known of a defect, and the small model that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ddp_equivalence import Case, Rank

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class KnownDefect:
    """``says``: what goes wrong. ``step``, ``model`` and ``loss``: show it. ``outcome``, ``cause``:
    of the verdict; ``words``: stand in its report. ``deadline``: seconds after which the ranks are
    taken to hang. ``upstream``: where it is known; empty if it was not reported. ``seen_in``:
    versions of torch that have it. ``fixed_in``: the first that does not; "" if there is none yet.
    ``instead``: what a user can write meanwhile.
    """

    name: str
    says: str
    step: Callable[[nn.Module, Any, Rank], None]
    outcome: str
    instead: str
    cause: str | None = None
    words: str = ""
    upstream: tuple[str, ...] = ()
    seen_in: tuple[str, ...] = ()
    fixed_in: str = ""
    model: Callable[[], nn.Module] = lambda: nn.Linear(5, 3)
    loss: Callable[[nn.Module, Any], Any] | None = None
    deadline: float = 60.0

    @property
    def case(self) -> Case:
        """Eight rows on two ranks."""
        return Case(model=self.model, batch=rows, loss=self.loss or squares, layout="1x2")


def rows(generator: torch.Generator) -> Batch:
    """Eight rows with three targets each."""
    return {
        "inputs": torch.randn(8, 5, generator=generator),
        "targets": torch.randn(8, 3, generator=generator),
    }


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error."""
    return mse_loss(model(batch["inputs"]), batch["targets"])


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Two micro-batches of two rows."""
    first = {name: value[:2] for name, value in batch.items()}
    return first, {name: value[2:] for name, value in batch.items()}
