"""The programs of ``benchmarks/programs`` are well formed, and a few of them are run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.programs.program import Program, all_programs
from benchmarks.programs.run import check_one
from ddp_equivalence.diagnosis.causes import HYPOTHESES

PROGRAMS = all_programs()

LEAST_OF_A_SIDE = 200


def few_in_every_change(programs: Iterable[Program], every: int) -> list[Any]:
    """Every fourth program, say, runs in every change; the others have the mark ``thorough``."""
    return [
        pytest.param(each, id=each.name, marks=pytest.mark.thorough if number % every else ())
        for number, each in enumerate(programs)
    ]


def one_of_each_topic(*, right: bool) -> list[Any]:
    """The first program of every topic, of those that do not end as "unknown"."""
    first: dict[str, Program] = {}
    for each in PROGRAMS:
        if each.right == right and each.because is None:
            first.setdefault(each.topic, each)
    return few_in_every_change(first.values(), 4)


def test_there_are_at_least_two_hundred_right_and_two_hundred_wrong_programs() -> None:
    count = Counter(each.right for each in PROGRAMS)
    assert min(count[True], count[False]) >= LEAST_OF_A_SIDE


def test_every_program_has_a_name_of_its_own() -> None:
    names = Counter(each.name for each in PROGRAMS)
    assert [name for name, times in names.items() if times > 1] == []


def test_every_program_says_in_a_sentence_what_it_does() -> None:
    is_sentence = {
        each.name: each.sentence.endswith(".") and len(each.sentence.split()) > 2
        for each in PROGRAMS
    }
    assert [name for name, is_one in is_sentence.items() if not is_one] == []


def test_every_program_declares_an_outcome_that_fits_its_side() -> None:
    declared = {each.name: (each.right, each.because is None, each.expected) for each in PROGRAMS}
    settled = {(True, True, "same"), (False, True, "different")}
    open_ones = {(True, False, "unknown"), (False, False, "unknown")}
    assert {name for name, one in declared.items() if one not in settled | open_ones} == set()


@pytest.mark.parametrize("program", one_of_each_topic(right=True))
def test_a_right_program_is_the_same(program: Program) -> None:
    result = check_one(program)
    assert (result.expected, result.got) == ("same", "same"), result.line


@pytest.mark.parametrize("program", one_of_each_topic(right=False))
def test_a_wrong_program_is_different(program: Program) -> None:
    result = check_one(program)
    assert (result.expected, result.got) == ("different", "different"), result.line


def test_declared_causes_are_names_of_causes() -> None:
    declared = {cause for each in PROGRAMS for cause in each.causes or ()}
    assert declared
    assert declared <= {one.name for one in HYPOTHESES} | {"no_optimizer_step"}


QUICK = ("ddp_plain_sgd", "by_flat_buffer_adamax", "calls_the_bare_model_1", "uneven_shards_3")
"""Programs that train, in every change. Others compile, or try edits for up to half a minute."""


def training(*, right: bool) -> list[Any]:
    """Every n-th program that trains."""
    of_side = [one for one in PROGRAMS if one.topic == "training" and one.right == right]
    return [
        pytest.param(one, id=one.name, marks=() if one.name in QUICK else pytest.mark.thorough)
        for one in of_side[:: len(of_side) // 5]
    ]


@pytest.mark.parametrize("program", training(right=True))
def test_a_right_training_loop_is_the_same(program: Program) -> None:
    assert check_one(program).got == "same"


@pytest.mark.parametrize("program", training(right=False))
def test_a_wrong_training_loop_is_different_and_has_no_wrong_name(program: Program) -> None:
    result = check_one(program)
    assert result.got == "different"
    assert result.naming in ({"named alone", "among rivals"} if program.causes else {"unnamed"})


def test_another_name_than_the_declared_one_is_a_surprise() -> None:
    (program,) = (one for one in PROGRAMS if one.name == "times_world_size_1")
    result = check_one(program)
    assert not result.surprising
    misnamed = replace(result, causes=("averaged_twice",))
    assert misnamed.naming == "wrongly named"
    assert misnamed.surprising
