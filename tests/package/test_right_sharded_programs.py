"""Sixty right programs whose models are sharded, by eight authors who knew no rule of this package.

They use FSDP2 and its hybrid form, FSDP1, replicate, ZeRO, tensor parallelism and DTensors by hand,
with accumulation, checkpointing, compilation, clipping, tied and uneven weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.steps.keys import RIGHT_SHARDED, verdict_of
from tests.combinations import THOROUGH

pytestmark = pytest.mark.self_check

EVERY = 5
"""One of so many runs in every change."""

PROGRAMS = sorted(RIGHT_SHARDED.glob("*.py"))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(one, marks=() if number % EVERY == 0 else THOROUGH, id=one.stem)
        for number, one in enumerate(PROGRAMS)
    ],
)
def test_a_right_program_with_a_sharded_model_is_the_same(program: Path) -> None:
    verdict = verdict_of(program)
    assert verdict.outcome == "same", str(verdict)
