"""Scripts whose steps differ from each other by more than weights and rows."""

from __future__ import annotations

import time

import pytest

from ddp_equivalence.observed_scripts.oracle import SECONDS_OF_KEPT
from tests.package.observed_scripts.observing import observed

LIMIT = 1e-13

HOLDS_IN_PYTHON = ["attribute", "local", "random", "numpy", "of_numpy", "own"]


@pytest.mark.parametrize("word", [*HOLDS_IN_PYTHON, "inner", "lazy"])
def test_a_right_script_is_the_same_whatever_changes_from_step_to_step(word: str) -> None:
    found = observed("varying.py", word, "dropout")
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 3, str(found)
    errors = [verdict.error for verdict in found.verdicts]
    assert all(error is not None and error < LIMIT for error in errors)


@pytest.mark.parametrize("word", [*HOLDS_IN_PYTHON, "inner", "lazy"])
def test_a_mistake_is_found_whatever_changes_from_step_to_step(word: str) -> None:
    found = observed("varying.py", word, "uneven")
    assert [verdict.outcome for verdict in found.verdicts] == ["different"] * 3, str(found)
    if word not in ("inner", "lazy"):  # it has further backward passes, which are named instead
        assert "rank 0 1, rank 1 1.1" in str(found), "each rank's rows were not computed alone"


def test_a_fork_of_a_process_with_several_threads_answers() -> None:
    """A fork has no other threads, and would wait for them for ever."""
    started = time.monotonic()
    found = observed("varying.py", "random", "uneven", "threads")
    assert [verdict.outcome for verdict in found.verdicts] == ["different"] * 3, str(found)
    assert time.monotonic() - started < SECONDS_OF_KEPT, "no fork ran into its deadline"


def test_a_penalty_on_every_rank_is_found_if_a_count_was_reduced_before_the_forward() -> None:
    assert observed("varying.py", "counted").outcome == "same"
    found = observed("varying.py", "counted", "penalised")
    assert [verdict.outcome for verdict in found.verdicts] == ["different"] * 3, str(found)
    marked = [line for line in str(found).splitlines() if line.startswith("> ")]
    assert ["loss = (fit + penalty) * dist.get_world_size()" in line for line in marked] == [True]


def test_a_script_may_end_before_the_last_step_that_was_to_be_recorded() -> None:
    assert [one.outcome for one in observed("varying.py", "two_steps").verdicts] == ["same"] * 2
    found = observed("varying.py", "two_steps", "attribute", "uneven")
    assert [verdict.outcome for verdict in found.verdicts] == ["different"] * 2, str(found)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("by_rank", "of_rank"),
        ("attribute own_mean", "mean_length"),
        ("own_average", "trainer.balance.average['output']"),
        ("own_last", "trainer.last[1]"),
    ],
)
def test_what_a_script_holds_in_python_is_named_where_it_differs(words: str, name: str) -> None:
    found = observed("varying.py", *words.split())
    wrong = [one for one in found.verdicts if one.outcome != "same"]
    assert {one.outcome for one in wrong} == {"unknown"}, str(found)
    assert f"{name} (" in wrong[0].reason.partition("in another state there: ")[2], str(found)
