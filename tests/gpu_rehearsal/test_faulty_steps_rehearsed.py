"""A watched step shows on NCCL the lines that it shows on the CPU."""

from __future__ import annotations

import pytest

from tests.faulty_steps.keys import KEYS
from tests.gpu_rehearsal.rehearsal import rehearse

PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--ddp-backend", "nccl")
STEPS = "tests/gpu_rehearsal/faulty_steps_on_gpus.py"

OF_EACH_KIND = (
    "s04_ or "  # a gradient is changed after a collective that gives no handle
    "s55_ or "  # a hook, which runs on the thread of the device
    "s100_ or "  # a backward method of the user's own, which runs there as well
    "s88_ or "  # an operation is recorded on ranks whose collectives give no handle
    "s127_"  # an operation is recorded that no other than one rank has
)

PARTS = 8
"""The thorough run takes the steps in so many parts, of half a minute each."""


def test_a_step_shows_on_nccl_the_lines_that_it_shows_on_the_cpu() -> None:
    rehearsed = rehearse(*PYTEST, STEPS, "-k", OF_EACH_KIND, gpus=4)
    assert rehearsed.returncode == 0, rehearsed.output
    assert "5 passed" in rehearsed.output


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_every_step_shows_what_it_shows_on_the_cpu(part: int) -> None:
    stems = [key["file"].removesuffix(".py") for key in KEYS[part::PARTS]]
    rehearsed = rehearse(*PYTEST, STEPS, "-k", " or ".join(stems), gpus=4, timeout=900)
    assert rehearsed.returncode == 0, rehearsed.output
