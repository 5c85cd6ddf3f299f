"""Few tests of a run have every pair of values that its tests have."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from itertools import combinations, product

import pytest

from ddp_equivalence.commands.suite_folder import TESTS
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.pytest_plugin.suite_run.plan import covering
from ddp_equivalence.strategies import STRATEGIES, catalogue
from tests.package.commands.test_command_line import A_FEW, ROOT

pytestmark = pytest.mark.usefixtures("no_cuda")

COUNTS = re.compile(r"selected ([\d,]+) of ([\d,]+) \(pairwise\); --all runs the rest")


def has(test: dict[str, object], *values: tuple[str, object]) -> bool:
    return all(test[factor] == value for factor, value in values)


@pytest.mark.parametrize("seed", range(30))
def test_every_pair_of_values_is_in_a_chosen_test(seed: int) -> None:
    draw = random.Random(seed)
    factors = {f"factor_{n}": draw.randrange(1, 5) for n in range(draw.randrange(2, 6))}
    every = [dict(zip(factors, one, strict=True)) for one in product(*map(range, factors.values()))]
    tests: list[dict[str, object]] = [dict(one) for one in draw.sample(every, len(every) // 2)]
    chosen = [tests[number] for number in covering(tests, [draw.random() for _ in tests])]
    for first, second in combinations(factors, 2):
        for test in tests:
            pair = ((first, test[first]), (second, test[second]))
            assert any(has(one, *pair) for one in chosen), pair


def test_tests_that_add_no_pair_are_left_out() -> None:
    """Four tests have all pairs of three factors with two values; a table of all has eight."""
    tests = [dict(zip("abc", one, strict=True)) for one in product((0, 1), repeat=3)]
    assert len(covering(tests)) == 4
    assert covering([{"a": 1, "b": 2}] * 5) == [0]
    assert covering([]) == []


def test_of_tests_with_the_same_pairs_the_cheap_one_is_chosen() -> None:
    assert covering([{"a": 1, "b": 2}] * 3, [2.0, 1.0, 3.0]) == [1]
    # The first adds two pairs at once; the others have all of them, and each is needed.
    tests = [
        dict(zip("abc", one, strict=True)) for one in ((0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0))
    ]
    assert covering(tests, [2.0, 1.0, 1.0, 1.0]) == [1, 2, 3]


def collected(*arguments: str, pairwise: bool = True) -> tuple[list[str], int]:
    """The tests that a run collects, and how many it leaves out."""
    words = ["-o", f"testpaths={TESTS}", "-W", "default", "-p", "no:cacheprovider"]
    if pairwise:
        words.append("--ddp-pairwise")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *words, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    left_out = re.search(r"\((\d+) deselected\)", done.stdout)
    return tests, 0 if left_out is None else int(left_out[1])


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_selection_of_the_suite_has_all_values_and_does_not_depend_on_the_order() -> None:
    tests, left_out = collected("-p", "randomly")
    every, _ = collected(*TESTS.split())
    assert len(every) == len(tests) + left_out
    assert left_out > len(every) / 2
    assert set(tests) < set(every)
    assert set(collected("-p", "no:randomly")[0]) == set(tests)
    # What a value is, is written here once more: a part of the name of a test.
    parts = {part for test in tests for part in re.split(r"[\[\]-]", test)}
    assert not {part for test in every for part in re.split(r"[\[\]-]", test)} - parts


def test_every_pair_of_the_catalogue_and_every_fault_is_selected() -> None:
    trials = [trial for name in STRATEGIES for trial in catalogue.trials(name)]
    factors = [trial.factors for trial in trials]
    chosen = [factors[number] for number in covering(factors)]
    for one, other in combinations(factors[0], 2):
        pairs = {(of_trial[one], of_trial[other]) for of_trial in factors}
        assert {(of_trial[one], of_trial[other]) for of_trial in chosen} == pairs
    assert {of_trial["strategy"] for of_trial in chosen} == set(STRATEGIES)
    planted = {
        test.partition("[")[2].partition("-")[0]
        for test in collected()[0]
        if "test_a_planted_fault_is_caught_and_named[" in test
    }
    assert planted == set(FAULTS)


@pytest.mark.parametrize("arguments", [(A_FEW,), ("-k", "contrastive and 1x2"), ("-m", "emulated")])
def test_tests_that_the_user_names_all_run(arguments: tuple[str, ...]) -> None:
    assert set(collected(*arguments)[0]) == set(collected(*arguments, pairwise=False)[0])


@pytest.mark.parametrize("words", [("--plan",), ("-n", "2", "--ddp-run-deadline", "0.001")])
def test_a_run_says_how_many_it_has_selected(words: tuple[str, ...]) -> None:
    """Without tests: with workers, time is over before the first. They select the same ones."""
    done = subprocess.run(
        [sys.executable, "-m", "ddp_equivalence", "run", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    counts = COUNTS.search(done.stdout)
    assert counts, done.stdout[-3000:]
    assert number(counts[2]) - number(counts[1]) == collected()[1]
