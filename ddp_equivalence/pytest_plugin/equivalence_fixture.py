"""The ``equivalence`` fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict


class Equivalence:
    """``check`` and ``assert_equivalent``, imported when they are first used."""

    @property
    def check(self) -> Callable[..., Verdict]:
        from ddp_equivalence.check_equivalence import check

        return check

    @property
    def assert_equivalent(self) -> Callable[..., Verdict]:
        from ddp_equivalence.check_equivalence import assert_equivalent

        return assert_equivalent


@pytest.fixture(scope="session")
def equivalence() -> Equivalence:
    """Compare with one big batch: ``equivalence.assert_equivalent(Case(...), my_step)``."""
    return Equivalence()
