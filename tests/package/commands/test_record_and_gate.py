"""``record`` writes what one's own checks show, and ``gate`` says what has changed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ddp_equivalence.commands.exit_codes import BAD_INPUT, DIFFERENT, NOT_JUDGED, SAME, YELLOW
from ddp_equivalence.commands.main import main
from ddp_equivalence.gate.record import NAME, Recorded, read_lines, read_record
from tests.package.forks import completed
from tests.package.gate.records import schema, validate, write
from tests.package.one_server import with_server_of_these_tests
from tests.package.report.report_cases import USER_FILE
from tests.package.someone_elses_run import LONGEST, PLUGINS

MINE = f"""\
{USER_FILE.replace("2x2", "1x2")}def step(model, shard, rank):
    ddp = nn.parallel.DistributedDataParallel(model)
    (loss(ddp, shard) * FACTOR).backward()
"""

TEST = """
import pytest
from mine import case, step

def test_step(equivalence):
    equivalence.assert_equivalent(case, step)

def test_of_something_else():
    pass

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass
"""

WORKS_WITH_THE_UPGRADE, AFTER_IT = "1", "rank.world_size"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a step and a test."""
    (tmp_path / "mine.py").write_text(MINE.replace("FACTOR", WORKS_WITH_THE_UPGRADE))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_mine.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text("")
    return tmp_path


def recorded(folder: Path, name: str, *words: str) -> tuple[int, str]:
    """Record into the folder ``name``. Returns the exit code and what was printed."""
    command = [sys.executable, "-m", "ddp_equivalence", "record", name, *words]
    variables = with_server_of_these_tests({**os.environ, **PLUGINS, "PYTHONPATH": str(folder)})
    run = completed(command, folder, variables, LONGEST)
    return run.returncode, run.stdout + run.stderr


def record_in(folder: Path, name: str) -> Recorded:
    return read_record(folder / name)


CHECK, IN_A_TEST = "check mine.py", "tests/test_mine.py::test_step"


@pytest.mark.thorough
def test_the_whole_way(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own)
    code, printed = recorded(own, "before", "--no-suite", "mine.py", "tests")
    assert code == SAME, printed
    assert "To compare it: ddp-equivalence gate OLD before" in printed
    before = record_in(own, "before")
    outcomes = {name: test.outcome for name, test in before.tests.items()}
    assert outcomes == {
        CHECK: "passed",
        IN_A_TEST: "passed",
        "tests/test_mine.py::test_of_something_else": "passed",
        "tests/test_mine.py::test_skipped": "skipped",
    }
    assert before.tests["tests/test_mine.py::test_skipped"].reason == "not today"
    for name in (CHECK, IN_A_TEST):
        check = before.checks[name, 0]
        assert (check.outcome, len(check.digests)) == ("same", 2)
        assert check.error is not None
        assert check.floor is not None
    assert sum(test.starts for test in before.tests.values()) == 2  # in a process of its own each
    assert before.checks[CHECK, 0].digests == before.checks[IN_A_TEST, 0].digests
    assert before.environment["packages"]["torch"]
    assert "torch.nn.parallel.DistributedDataParallel(bucket_cap_mb)" in before.defaults
    assert before.end is not None
    assert before.end["peak_mib"] > 50

    for line in read_lines(own / "before" / NAME):
        validate(line)
        described = schema()["$defs"][line["kind"]]["properties"]
        assert set(line) <= set(described)
        if line["kind"] == "environment":
            assert set(line["values"]) == set(described["values"]["properties"])
    code = main(["gate", "before", "--against-now", "again", "-n", "2"])
    printed = capsys.readouterr().out
    assert code in (SAME, YELLOW), printed  # yellow if it took much longer
    assert "RED" not in printed
    again = record_in(own, "again")
    assert again.checks[CHECK, 0].digests == before.checks[CHECK, 0].digests
    assert again.facts["asked"] == before.facts["asked"]

    (own / "mine.py").write_text(MINE.replace("FACTOR", AFTER_IT))
    code, printed = recorded(own, "after", "--no-suite", "mine.py", "tests")
    assert code == DIFFERENT, printed
    assert main(["gate", "before", "again", "after"]) == DIFFERENT
    report = capsys.readouterr().out
    assert report.startswith("red: again -> after (the same packages)\n")
    assert "RED  verdict_worse: 2   A check that was right is not" in report
    assert f"  {CHECK}\n      same -> different [sum_not_mean], error 1, limit" in report
    assert "; before that same 1 time\n" in report
    assert "test_failed" not in report
    assert not [path for path in own.rglob("*") if path.name == ".pytest_cache"]


def test_a_check_that_is_wrong_after_the_upgrade_is_red(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own)
    code, printed = recorded(own, "before", "--no-suite", "mine.py")
    assert code == SAME, printed
    (own / "mine.py").write_text(MINE.replace("FACTOR", AFTER_IT))
    code, printed = recorded(own, "after", "--no-suite", "mine.py")
    assert code == DIFFERENT, printed
    assert main(["gate", "before", "after"]) == DIFFERENT
    report = capsys.readouterr().out
    assert "RED  verdict_worse: 1   A check that was right is not" in report
    assert f"  {CHECK}\n      same -> different [sum_not_mean], error 1, limit" in report


def record_of(folder: Path, **asked: object) -> None:
    """A record that says that it is of this."""
    of_nothing = {"suite": "none", "paths": [], "observed": [], "selected": ""}
    write(folder, asked={**of_nothing, **asked})


def test_a_record_does_not_decide_alone_what_is_run(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may come from somebody else."""
    monkeypatch.chdir(own)
    (own.parent / "outside.py").write_text("open('was_run', 'w')\n")
    record_of(own / "observing", observed=["touch was_run"])
    record_of(own / "outside", paths=["../outside.py"])
    for name, message in (
        ("observing", "each of which will be run: --observe 'touch was_run'"),
        ("outside", "call `record` yourself for others; this one is of '../outside.py'"),
    ):
        assert main(["gate", name, "--against-now", "out"]) == BAD_INPUT
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (own / "out").exists()
    assert not (own / "was_run").exists()


def test_the_suite_is_recorded_unless_it_is_left_out(own: Path) -> None:
    words = ("ddp_sum and 1x1 and float64 and gru_tied",)
    code, printed = recorded(own, "suite", "mine.py", "-k", f"({words[0]}) or mine")
    assert code == SAME, printed
    found = record_in(own, "suite")
    of_suite = [name for name in found.tests if name.startswith("suite: tests/equivalence/")]
    assert of_suite
    assert {name.partition(" ")[0] for name in found.tests} == {"suite:", "check"}


def test_a_run_in_which_nothing_is_selected_is_no_success(own: Path) -> None:
    code, printed = recorded(own, "nothing", "--no-suite", "tests", "-k", "nothing_like_it")
    assert code == NOT_JUDGED, printed


def test_a_policy_makes_yellow_of_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "old")
    write(tmp_path / "new", checks={"mine.py": {"limit": 1e-12}})
    assert main(["gate", "old", "new"]) == DIFFERENT
    (tmp_path / "policy.toml").write_text("[levels]\nlimit_grew = 'yellow'\n")
    assert main(["gate", "old", "new", "--policy", "policy.toml"]) == YELLOW
    assert "decided by policy.toml: levels.limit_grew" in capsys.readouterr().out


CRASHES = """
import os

def test_before():
    pass

def test_that_ends_its_process():
    os._exit(1)
"""


def test_a_worker_that_crashes_is_a_test_that_fails(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(CRASHES)
    words = ("--no-suite", "test_crash.py", "-n", "1")
    code, printed = recorded(tmp_path, "record", *words)
    assert code == DIFFERENT, printed
    found = record_in(tmp_path, "record")
    outcomes = {name.rpartition("::")[2]: test.outcome for name, test in found.tests.items()}
    assert outcomes == {"test_before": "passed", "test_that_ends_its_process": "failed"}
    assert found.collected == 2
    code, printed = recorded(tmp_path, "killed", "--no-suite", "test_crash.py", "-k", "process")
    assert code == DIFFERENT, printed  # pytest itself ended with the test
    assert record_in(tmp_path, "killed").tests == {}
    assert record_in(tmp_path, "killed").collected == 1


XFAILS = """
import pytest

@pytest.mark.xfail(reason="later")
def test_it():
    raise ValueError("no")
"""


def test_a_failure_that_is_expected_is_no_pass_and_no_skip(tmp_path: Path) -> None:
    (tmp_path / "test_later.py").write_text(XFAILS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    code, printed = recorded(tmp_path, "record", "--no-suite", "test_later.py")
    assert code == SAME, printed
    (test,) = record_in(tmp_path, "record").tests.values()
    assert (test.outcome, test.reason) == ("xfailed", "ValueError: no")


WRONG = """
import pytest
from mine import case, step

@pytest.mark.xfail(reason="until the release")
def test_wrong(equivalence):
    equivalence.assert_equivalent(case, step)
"""


@pytest.mark.thorough
def test_the_checks_of_a_failure_that_is_expected_are_recorded(own: Path) -> None:
    """Its cause may change."""
    (own / "mine.py").write_text(MINE.replace("FACTOR", AFTER_IT))
    (own / "test_wrong.py").write_text(WRONG)
    code, printed = recorded(own, "record", "--no-suite", "test_wrong.py")
    assert code == SAME, printed
    assert "1 xfailed" in printed
    found = record_in(own, "record")
    check = found.checks["test_wrong.py::test_wrong", 0]
    assert (check.outcome, check.expected) == ("different", "same")
    assert check.cause == "sum_not_mean"
    assert "compared with one big batch" not in printed  # the table counts what passed or failed
