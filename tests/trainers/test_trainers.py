"""Six right training scripts of about a hundred lines, and each of them with one mistake.

Their authors knew neither this package nor its rules. A mistake is none on one device: it makes
what several ranks compute differ from one device with one big batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_equivalence import observe
from ddp_equivalence.observed_scripts.observed import Observed

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ("buffers", "classifier", "clips", "distill", "draws", "moving_state")

FIRST_WRONG = {"buffers": 2, "classifier": 8, "distill": 2, "moving_state": 4}
"""The step in which the mistake is first seen, if it is not the first."""

STEPS = {"classifier": 10}

CAUSES = {
    "buffers": "buffers_differ_from_big_batch",
    "classifier": "optimizers_differ_between_ranks",
    "clips": "token_counts_weighted_equally",
    "distill": "buffers_differ_from_big_batch",
}
"""Where a mistake has a name."""


def observed(script: str, name: str) -> Observed:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = (*torchrun, "--nproc-per-node", "2", script)
    return observe(command, folder=SCRIPTS, deadline=300.0, steps=STEPS.get(name, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_right_trainer_is_the_same(name: str) -> None:
    found = observed(f"right_{name}.py", name)
    assert {one.outcome for one in found.verdicts} == {"same"}, str(found)
    assert len(found.verdicts) >= STEPS.get(name, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_with_one_mistake_is_different_from_its_first_wrong_step_on(name: str) -> None:
    found = observed(f"wrong_{name}.py", name)
    right = FIRST_WRONG.get(name, 1) - 1
    outcomes = [one.outcome for one in found.verdicts]
    assert outcomes[: right + 1] == ["same"] * right + ["different"], str(found)
    assert found.cause == CAUSES.get(name), str(found)
