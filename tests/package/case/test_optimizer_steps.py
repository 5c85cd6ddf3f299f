"""Every step of an optimizer is counted, also after one that has raised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_equivalence.case.training import StepCount


class OutOfMemory(RuntimeError): ...


class Raises(SGD):
    """Raises in its first step, as an optimizer does that has no memory left."""

    raises = True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self.raises:
            self.raises = False
            if closure is not None:
                closure()
            raise OutOfMemory
        result: float | None = super().step(closure)
        return result


class Counts(StepCount):
    """Counts the calls of ``before`` and ``after`` too."""

    def __init__(self) -> None:
        super().__init__()
        self.began = self.ended = 0

    def before(self, optimizer: Optimizer) -> None:
        self.began += 1

    def after(self) -> None:
        self.ended += 1


class Outer(SGD):
    """Lets another optimizer step inside its own step, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: list[Tensor], inner: Optimizer) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self.inner.step()
        return None


def parameters() -> list[Tensor]:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return [weight]


@pytest.mark.parametrize("closure", [None, lambda: 0.0], ids=["no closure", "closure"])
def test_steps_after_one_that_has_raised_are_counted(closure: Callable[[], float] | None) -> None:
    optimizer, count = Raises(parameters(), lr=0.1), Counts()
    with count.watched():
        for _ in range(3):
            with suppress(OutOfMemory):
                optimizer.step(closure)
    assert (count.seen, count.began, count.ended) == (3, 3, 2)


def test_a_step_inside_another_one_is_no_step_of_its_own() -> None:
    optimizer, count = Outer(parameters(), Raises(parameters(), lr=0.1)), Counts()
    with count.watched():
        with suppress(OutOfMemory):
            optimizer.step()
        optimizer.step()
        optimizer.step()
    assert (count.seen, count.began, count.ended) == (3, 3, 2)


def test_nothing_of_the_watch_is_left_at_an_optimizer_whose_step_has_raised() -> None:
    optimizer = Raises(parameters(), lr=0.1)
    with Counts().watched(), suppress(OutOfMemory):
        optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
