"""Scripts that train in phases, each with a loader of its own."""

from __future__ import annotations

import pytest

from tests.package.observed_scripts.observing import observed, source_of_fault

KINDS = ["first_the_head", "two_models", "in_turns"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_phase_is_computed_from_its_own_loader(kind: str) -> None:
    found = observed("phases.py", kind, steps=4)
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 4, str(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_of_the_second_phase_is_found_in_its_steps(kind: str) -> None:
    found = observed("phases.py", kind, "wrong", steps=4)
    first_wrong = 1 if kind == "in_turns" else 2
    right, wrong = found.verdicts[:first_wrong], found.verdicts[first_wrong:]
    assert {one.outcome for one in right} == {"same"}, str(found)
    assert {one.outcome for one in wrong} == {"different"}, str(found)
    assert found.cause == "raw_module_called", str(found)
    assert "second(model)" in source_of_fault(found)


@pytest.mark.parametrize(("words", "outcome"), [("", "same"), ("wrong", "different")])
def test_the_second_phase_alone_can_be_observed(words: str, outcome: str) -> None:
    found = observed("phases.py", "first_the_head", *words.split(), from_step=2, steps=2)
    assert [verdict.outcome for verdict in found.verdicts] == [outcome] * 2, str(found)
