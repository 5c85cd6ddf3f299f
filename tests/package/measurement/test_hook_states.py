"""What decides in a communication hook: the numbers of its state that its conditions name."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

from ddp_equivalence.measurement.calls import attributes_of_hook, state_of_hook

pytestmark = pytest.mark.self_check


class Counting:
    """A state with a number that a hook asks, and one that it does not."""

    def __init__(self, period: int, size: float) -> None:
        self.period = period
        self.size = size
        self.calls = 0

    def method(self, state: object, bucket: Any) -> Any:
        return bucket if self.calls < self.period else self.size

    def __call__(self, state: object, bucket: Any) -> Any:
        while self.calls:
            self.calls -= 1
        return bucket


def asking(state: Counting, bucket: Any) -> Any:
    if state.calls % state.period:
        return bucket
    return state.size


def silent(state: Counting, bucket: Any) -> Any:
    return bucket.div_(state.size)


STATE = Counting(2, 4.0)


@pytest.mark.parametrize(
    ("hook", "state", "asked"),
    [
        (asking, STATE, ("calls", "period")),
        (silent, STATE, ()),
        (STATE.method, None, ("calls", "period")),
        (STATE, None, ("calls",)),
        (asking, 4, None),
        (asking, Counting, None),
    ],
)
def test_the_attributes_that_conditions_of_a_hook_name_are_known(
    hook: Any, state: Any, asked: tuple[str, ...] | None
) -> None:
    known = state_of_hook(hook, state)
    assert (None if known is None else known.asked) == asked


def test_a_state_of_torch_shows_its_numbers_though_they_are_in_slots() -> None:
    state = PostLocalSGDState(None, None, 7)
    known = state_of_hook(post_localSGD_hook, state)
    assert known is not None
    assert known.kind == "PostLocalSGDState"
    assert known.arguments[2] == "start_localSGD_iter"
    assert "start_localSGD_iter" in known.asked
    assert attributes_of_hook(state)["start_localSGD_iter"] == 7
