"""A test that makes a check and reads nothing of its verdict asserts nothing, so it fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.package.pytest_plugin.test_pytest_plugin import THEIR_TEST
from tests.package.someone_elses_run import run

HEAD = THEIR_TEST.partition("def test_fixture")[0]

THEIR_TESTS = """
import copy, unittest

def test_forgets_the_assert_and_differs(equivalence):  # FAILED
    equivalence.check(CASE, wrong_step)

def test_forgets_the_assert_and_is_the_same():  # FAILED
    check(CASE, step)

def test_keeps_it_in_a_variable():  # FAILED
    verdict = check(CASE, step)
    assert verdict is not None

def test_asserts_the_verdict_itself(equivalence):  # FAILED
    assert equivalence.check(CASE, wrong_step)

def test_returns_it(equivalence):  # FAILED
    return equivalence.check(CASE, wrong_step)

def test_shows_its_repr(equivalence):  # FAILED
    assert repr(equivalence.check(CASE, step)).startswith("Verdict(case=Case(model=")

def test_compares_it_with_text(equivalence):  # FAILED
    assert equivalence.check(CASE, step) != "different"

def test_asks_only_what_it_gave(equivalence):  # FAILED
    assert equivalence.check(CASE, step).subject == "step"

def test_reads_one_of_two(equivalence):  # FAILED
    equivalence.check(CASE, wrong_step)
    assert equivalence.check(CASE, step).outcome == "same"

def test_reads_the_outcome(equivalence):  # PASSED
    assert equivalence.check(CASE, step).outcome == "same"

def test_reads_the_shares(equivalence):  # PASSED
    assert equivalence.check(CASE, wrong_step).shares is not None

def test_prints_it(equivalence):  # PASSED
    print(equivalence.check(CASE, wrong_step))

def test_formats_it(equivalence):  # PASSED
    assert "averaged_twice" in f"{equivalence.check(CASE, wrong_step)}"

def test_copies_it_and_reads_the_copy(equivalence):  # PASSED
    assert copy.copy(equivalence.check(CASE, step)).outcome == "same"

def test_asserts_equivalence(equivalence):  # PASSED
    equivalence.assert_equivalent(CASE, step)

def test_expects_a_difference(equivalence):  # PASSED
    with pytest.raises(NotEquivalent):
        equivalence.assert_equivalent(CASE, wrong_step)

def test_expects_bad_input(equivalence):  # PASSED
    with pytest.raises(BadCase):
        equivalence.check(CASE, step, lr=-1)

def test_fails_for_a_reason_of_its_own(equivalence):  # FAILED
    equivalence.check(CASE, step)
    assert 1 == 2

def test_is_skipped_on_the_way(equivalence):
    equivalence.check(CASE, step)
    pytest.skip("no data")

@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(equivalence):  # FAILED
    equivalence.check(CASE, wrong_step)

@pytest.fixture
def judged_at_the_end():
    verdicts = []
    yield verdicts
    assert [verdict.outcome for verdict in verdicts] == ["same"]

def test_leaves_it_to_its_fixture(judged_at_the_end):  # PASSED
    judged_at_the_end.append(check(CASE, step))

KEPT = []

def test_keeps_it_for_a_later_test():  # PASSED ERROR
    KEPT.append(check(CASE, step))

def test_reads_what_an_earlier_test_kept():  # PASSED
    assert KEPT[0].outcome == "same"

@pytest.fixture
def of_one_test():
    return check(CASE, step)

def test_ignores_its_fixture(of_one_test):  # PASSED ERROR
    pass

def test_reads_its_fixture(of_one_test):  # PASSED
    assert of_one_test.outcome == "same"

@pytest.fixture(scope="module")
def of_the_module():
    return check(CASE, step)

def test_reads_the_fixture_of_the_module(of_the_module):  # PASSED
    assert of_the_module.outcome == "same"

def test_ignores_the_fixture_of_the_module_that_another_test_reads(of_the_module):  # PASSED
    pass

class Unittest(unittest.TestCase):
    def test_in_unittest(self):  # FAILED
        check(CASE, wrong_step)

    def test_fails_in_unittest(self):  # FAILED
        check(CASE, wrong_step)
        self.fail("for a reason of its own")

class TestIgnored:
    @pytest.fixture(scope="class")
    def of_the_class(self):
        return check(CASE, wrong_step)

    def test_ignores_the_fixture_of_its_class(self, of_the_class):  # PASSED ERROR
        pass
"""

FIRST_LINE = 1 + (HEAD + THEIR_TESTS).splitlines().index("    equivalence.check(CASE, wrong_step)")
"""The line of the first check whose verdict nobody reads."""

EXPECTED = {
    name: set(states.split())
    for name, states in re.findall(
        r"def (test_\w+)\(.*\):  # ([A-Z ]+)$", THEIR_TESTS, re.MULTILINE
    )
}
"""Test -> the states that pytest's closing list gives it; some tests pass and have an error."""


@pytest.fixture(scope="module")
def their_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "test_theirs.py").write_text(HEAD + THEIR_TESTS)
    code, text = run(folder, "-rA", "--tb=short")
    assert code == 1, text
    return text


def test_each_test_fails_unless_it_reads_its_verdict(their_run: str) -> None:
    found: dict[str, set[str]] = {}
    for state, name in re.findall(r"^([A-Z]+) test_theirs\.py::(\S+)", their_run, re.MULTILINE):
        found.setdefault(name.rpartition("::")[2], set()).add(state)
    assert found == EXPECTED
    assert len(EXPECTED) == 29


def test_a_skipped_test_stays_skipped(their_run: str) -> None:
    assert re.search(r"1 skipped", their_run)


@pytest.mark.parametrize(
    "says",
    [
        f"test_theirs.py:{FIRST_LINE}: The check of wrong_step came out different, and nothing of "
        "its verdict was read. Write assert_equivalent(case, step), or assert check(case, step)."
        'outcome == "same".',
        "The check of step came out same, and nothing of its verdict was read.",
        "FAILED test_theirs.py::test_fails_for_a_reason_of_its_own - assert 1 == 2",
        "AssertionError: for a reason of its own",
        'TypeError: A verdict is neither true nor false. Write verdict.outcome == "same", or call '
        "assert_equivalent(case, step)",
        "in the fixture of_the_class",
    ],
)
def test_the_message_says_what_to_write(their_run: str, says: str) -> None:
    assert says in " ".join(their_run.replace("E   ", "").split())


def test_the_workers_of_xdist_fail_them_too(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(HEAD + THEIR_TESTS)
    code, text = run(tmp_path, "-n", "1", "-k", "test_forgets or test_reads_the_outcome")
    assert code == 1
    assert "2 failed, 1 passed" in text


def test_with_a_planted_fault_it_has_not_noticed_the_fault(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(HEAD + THEIR_TESTS)
    code, text = run(tmp_path, "--plant=sum_not_mean", "-k", "test_forgets_the_assert_and_is")
    assert code == 0, text
    assert "NOT NOTICED by 1 tests" in text
