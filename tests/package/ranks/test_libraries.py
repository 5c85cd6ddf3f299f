"""Whether a module uses torch is found without comparing its values."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from ddp_equivalence.ranks.process_state import _uses_torch


class Incomparable:
    """Like a value in the standard library's zoneinfo, whose comparison looks for an attribute."""

    def __eq__(self, other: object) -> bool:
        raise AttributeError("no attribute 'utcoff'")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("uses", [True, False])
def test_a_value_that_cannot_be_compared_does_not_stop_the_search(uses: bool) -> None:
    module = ModuleType("a_module")
    vars(module).update(first=Incomparable(), second=torch if uses else None)
    assert _uses_torch(module) is uses
