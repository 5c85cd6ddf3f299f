"""Optimizers that make other updates on other ranks, though the gradients are right."""

from __future__ import annotations

import re

import pytest

from tests.package.observed_scripts.observing import observed, source_of_fault

SCRIPT = "parting.py"


@pytest.mark.parametrize(
    ("words", "outcomes", "differs", "line"),
    [
        pytest.param(
            "plateau own",
            ["same", "same", "same", "different"],
            "until step 3, .* lr of group 0 is 0.1 on rank 0, 0.01 on rank 1",
            "scheduler.step(own)",
            id="a schedule by each rank's own loss",
        ),
        pytest.param(
            "adam loaded",
            ["same", "different"],
            "until step 1, .* step of 0.weight is 1 on rank 0, none on rank 1",
            "optimizer.load_state_dict(state)",
            id="state that one rank has loaded",
        ),
        pytest.param(
            "by_hand",
            ["same", "same", "different"],
            "until step 2, .* lr of group 0 is 0.1 on rank 0, 0.2 on rank 1",
            'group["lr"] *= 1 + rank',
            id="a rate that is set by rank",
        ),
        pytest.param(
            "decay",
            ["same", "different"],
            "until step 1, .* weight_decay of group 0 is 0 on rank 0, 0.1 on rank 1",
            "optimizer = SGD(",
            id="an option that is given by rank",
        ),
        pytest.param(
            "cleared",
            ["same", "same", "different"],
            "until step 2, .* momentum_buffer of 0.weight differs",
            "optimizer.step()",
            id="state that one rank has cleared",
        ),
        pytest.param(
            "noisy",
            ["same", "different"],
            "until step 1, in which the optimizers of the ranks make different updates",
            "optimizer.step()",
            id="noise in the update",
        ),
    ],
)
def test_the_step_in_which_weights_part_is_named_with_what_differs(
    words: str, outcomes: list[str], differs: str, line: str
) -> None:
    found = observed(SCRIPT, *words.split(), steps=len(outcomes))
    assert [one.outcome for one in found.verdicts] == outcomes, str(found)
    assert found.cause == "optimizers_differ_between_ranks"
    (finding, *_) = found.verdict.findings
    assert re.search(differs, finding.headline), finding.headline
    assert source_of_fault(found).startswith(line)


@pytest.mark.parametrize("words", ["plateau", "adam loaded on_all"])
def test_optimizers_that_are_changed_alike_are_right(words: str) -> None:
    found = observed(SCRIPT, *words.split(), steps=4)
    assert [one.outcome for one in found.verdicts] == ["same"] * 4, str(found)
