"""The plugin in somebody else's repository: the fixture, the options and the closing table."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.options import check_markers
from tests.package.someone_elses_run import run

THEIR_TEST = """
import pytest, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_equivalence import BadCase, Case, NotEquivalent, assert_equivalent, check

def build():
    return nn.Linear(3, 2)

def batch(generator):
    return torch.randn(8, 3, generator=generator)

def loss(model, rows):
    return model(rows).square().mean()

def step(model, rows, rank):
    ddp = DistributedDataParallel(model)
    loss(ddp, rows).backward()

def wrong_step(model, rows, rank):
    print("rank", rank.rank, "was here")
    ddp = DistributedDataParallel(model)
    (loss(ddp, rows) / rank.world_size).backward()

CASE = Case(model=build, batch=batch, loss=loss, layout="1x2")

def test_fixture(equivalence):
    equivalence.assert_equivalent(CASE, step)

def test_import():
    assert_equivalent(CASE, lambda model, rows, rank: step(model, rows, rank))

def test_known(equivalence):
    assert equivalence.check(CASE, wrong_step).cause == "averaged_twice"
"""

THEIR_FAILURE = """
def test_fails(equivalence):
    equivalence.assert_equivalent(CASE, wrong_step)
"""

SLOW = (
    THEIR_TEST.partition("CASE =")[0]
    + """
def sleeps(model, rows, rank):
    import os, pathlib, time
    pathlib.Path(f"pid{rank.rank}").write_text(str(os.getpid()))
    time.sleep(60)

def test_slow(equivalence):
    equivalence.assert_equivalent(Case(model=build, batch=batch, loss=loss), sleeps)
"""
)

ALONE = "def test_alone():\n    import sys\n    assert 'torch' not in sys.modules\n"


@pytest.fixture
def their_repository(tmp_path: Path) -> Path:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_training.py").write_text(THEIR_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


HAS_SERVER = """
from multiprocessing import forkserver

def pytest_collection_finish():
    print("server:", forkserver._forkserver._forkserver_pid is not None)
"""


@pytest.mark.parametrize(
    ("file", "arguments", "starts"),
    [
        (THEIR_TEST, ("-k", "test_fixture"), True),
        (THEIR_TEST, ("--collect-only",), False),
        (ALONE, (), False),
    ],
    ids=["ours", "collected only", "theirs alone"],
)
def test_the_ranks_server_starts_while_a_file_that_will_need_it_is_imported(
    tmp_path: Path, file: str, arguments: tuple[str, ...], starts: bool
) -> None:
    (tmp_path / "test_theirs.py").write_text(file)
    (tmp_path / "conftest.py").write_text(HAS_SERVER)
    code, text = run(tmp_path, "-s", *arguments, own_processes=True)
    assert code == 0, text
    assert f"server: {starts}" in text


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--import-mode=importlib", "-s"),
        ("-n", "2", "--fresh-ranks"),
    ],
    ids=" ".join,
)
def test_their_tests_run_and_end_with_the_table(
    their_repository: Path, arguments: tuple[str, ...]
) -> None:
    code, text = run(their_repository, *arguments)
    assert code == 0, text
    assert "3 passed" in text
    assert "compared with one big batch" in text
    assert re.search(r"^step +1 +same$", text, re.MULTILINE), text
    assert "differ, as their tests expect  1 (averaged_twice)" in text
    assert re.search(r"3 cases compared .*: 12 gradients of parameters, on 6 ranks", text)


def test_a_failure_shows_the_report_the_ranks_output_and_how_to_repeat_it(
    their_repository: Path,
) -> None:
    path = their_repository / "tests" / "test_training.py"
    path.write_text(THEIR_TEST + THEIR_FAILURE)
    results = their_repository / "results.json"
    code, text = run(their_repository, f"--ddp-json={results}", "-k", "fails", "--tb=short")
    assert code == 1
    assert "different: wrong_step (tests/test_training.py:" in text
    assert "[averaged_twice]" in text
    assert 'Again: pytest "tests/test_training.py::test_fails"' in text
    assert "More: --ddp-full" in text
    assert "output of rank 1 (node 0)" in text
    assert "rank 1 was here" in text
    assert re.search(r"^wrong_step +1 +1 DIFFER$", text, re.MULTILINE), text
    (case,) = json.loads(results.read_text())["cases"]
    assert case["outcome"] == "different"
    assert case["report"].startswith("different: wrong_step (tests/test_training.py:")
    assert "wrong_step is not big_batch: averaged_twice" in case["full_report"]
    assert case["headline"].endswith("[averaged_twice]")
    assert case["file"] == str(path)
    assert case["cause"] == "averaged_twice"
    assert case["expected"] == "same"
    assert case["error"] == pytest.approx(0.5)


def test_annotations_and_full_reports_come_only_if_they_are_asked_for(
    their_repository: Path,
) -> None:
    path = their_repository / "tests" / "test_training.py"
    path.write_text(THEIR_TEST + THEIR_FAILURE)
    code, text = run(their_repository, "--ddp-github", "--ddp-full", "--tb=short")
    assert code == 1
    (annotation,) = [line for line in text.splitlines() if line.startswith("::error ")]
    assert re.match(r"::error file=tests/test_training.py,line=\d+,title=different%3A ", annotation)
    assert "wrong_step is not big_batch: averaged_twice" in text
    code, text = run(their_repository, "--tb=short")
    assert code == 1
    assert "::error" not in text
    assert "is not big_batch" not in text


def test_a_check_that_fails_in_a_fixture_is_in_the_table_too(their_repository: Path) -> None:
    path = their_repository / "tests" / "test_training.py"
    fixture = (
        "@pytest.fixture\n"
        "def trained(equivalence):\n    equivalence.assert_equivalent(CASE, wrong_step)\n\n"
        "def test_it(trained):\n    pass\n"
    )
    path.write_text(THEIR_TEST + fixture)
    code, text = run(their_repository, "-k", "test_it")
    assert code == 1
    assert re.search(r"^wrong_step +1 +1 DIFFER$", text, re.MULTILINE), text


def test_an_unknown_verdict_that_a_test_expects_is_in_the_table(their_repository: Path) -> None:
    path = their_repository / "tests" / "test_training.py"
    unknown_test = (
        "def test_unknown(equivalence):\n"
        "    assert equivalence.check(CASE, lambda *all: None).outcome == 'unknown'\n"
    )
    path.write_text(THEIR_TEST + unknown_test)
    code, text = run(their_repository, "-k", "test_unknown")
    assert code == 0, text
    assert "unknown, as their tests expect" in text
    assert "NOTHING was compared with one big batch" in text


def test_planted_faults_have_a_row_that_counts_the_missed_ones(
    their_repository: Path,
) -> None:
    path = their_repository / "tests" / "test_training.py"
    planted_test = (
        "import pytest\n"
        "@pytest.mark.planted_fault('averaged_twice')\n"
        "@pytest.mark.parametrize('step', [wrong_step, step, lambda *all: None])\n"
        "def test_planted(equivalence, step):\n    print(equivalence.check(CASE, step))\n"
    )
    path.write_text(THEIR_TEST + planted_test)
    code, text = run(their_repository, "-k", "test_planted")
    assert code == 0, text  # such a test asserts for itself; this one only prints
    line = r"planted faults +1 of 2 caught, 1 of 2 named \(1 kind\), nearest \de\+\d+ limits away"
    assert re.search(rf"^{line}\n +1 UNKNOWN\n +1 MISSED$", text, re.MULTILINE), text
    assert "NOTHING was compared" not in text
    assert "wrong_step" not in text.partition("compared with one big batch")[2]


def test_the_results_have_the_documented_form(their_repository: Path) -> None:
    results = their_repository / "results.json"
    code, text = run(their_repository, f"--ddp-json={results}", "-k", "fixture")
    assert code == 0, text
    content: dict[str, Any] = json.loads(results.read_text())
    assert set(content) == {"environment", "cases", "not_run", "summary"}
    keys = ["id", "strategy", "layout", "backend", "dtype", "expected", "outcome", "cause"]
    keys += ["error", "floor", "limit", "seconds"]
    assert set(keys) <= set(content["cases"][0])
    assert content["cases"][0]["id"] == "tests/test_training.py::test_fixture"
    assert content["summary"]["compared"] == 1
    assert content["environment"]["torch"]


@pytest.mark.parametrize("lane", ["nccl", "data_parallel"])
def test_a_lane_that_must_run_and_did_not_fails_the_run(
    their_repository: Path, lane: str, no_cuda: None
) -> None:
    """With nccl the test fails, as it must not fall back. With data_parallel only the run fails."""
    code, text = run(their_repository, f"--must-run={lane}", "-k", "fixture")
    assert code == 1
    assert f"--must-run {lane}: FAILED, nothing was compared on this lane" in text


def test_a_run_that_compares_nothing_says_nothing_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "test_alone.py").write_text(ALONE)
    code, text = run(tmp_path, own_processes=True)
    assert code == 0, text
    assert "big batch" not in text


def test_the_options_have_a_group_of_their_own(tmp_path: Path) -> None:
    _, text = run(tmp_path, "--help")
    group = text.partition("ddp_equivalence: compared with one big batch:")[2]
    for option in ("--must-run", "--ddp-json", "--ddp-backend", "--ddp-deadline", "--fresh-ranks"):
        assert option in group


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--must-run=nvlink", "invalid choice: 'nvlink'"),
        ("--ddp-backend=mpi", "invalid choice: 'mpi'"),
        ("--ddp-deadline=soon", "it is soon; it should be a number of seconds above 0"),
        ("--ddp-deadline=-1", "it is -1; it should be a number of seconds above 0"),
        (
            "--ddp-deadline=5 --ddp-collective-deadline=5",
            "deadline is 5; it should be below --ddp-deadline",
        ),
        (
            "--ddp-trial-seconds=-1",
            "it is -1; it should be a number of seconds, or 0 for no trials",
        ),
        (
            "--ddp-trial-seconds=soon",
            "it is soon; it should be a number of seconds, or 0 for no trials",
        ),
        (
            "--ddp-trial-seconds=nan",
            "it is nan; it should be a number of seconds, or 0 for no trials",
        ),
        ("--ddp-json=/no/such/folder/results.json", "there is no folder /no/such/folder"),
        ("--ddp-json=.", "--ddp-json is .; it should be a file in a folder that exists and can be"),
        ("--ddp-json=/proc/x.json", "--ddp-json is /proc/x.json; it should be a file"),
        ("--ddp-export-repro=/proc/x", "--ddp-export-repro is /proc/x; it should be a folder"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(
    tmp_path: Path, argument: str, says: str
) -> None:
    code, text = run(tmp_path, *argument.split())
    assert code == 4
    assert says in text


mark = pytest.mark


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        (
            pytest.mark.planted_fault(),
            "test_a: @pytest.mark.planted_fault() should have the name of one fa",
        ),
        (
            pytest.mark.planted_fault("nosuch"),
            "should have the name of one fault, such as sum_not_mean",
        ),
        (
            pytest.mark.trial("ddp_mean"),
            "@pytest.mark.trial('ddp_mean') should have strategy, layout and",
        ),
        (
            pytest.mark.ddp(deadline=1, collective_deadline=5),
            "should have a collective_deadline below the d",
        ),
        (mark.ddp(deadline="5"), "(deadline='5') should have a number of seconds above 0"),
        (mark.ddp(deadline=-1), "(deadline=-1) should have a number of seconds above 0"),
        (
            pytest.mark.ddp(trial_seconds=-1),
            "(trial_seconds=-1) should have a number of seconds, or 0 for",
        ),
        (
            pytest.mark.ddp(trial_seconds="5"),
            "(trial_seconds='5') should have a number of seconds, or 0",
        ),
        (
            pytest.mark.ddp(trial_seconds=math.nan),
            "(trial_seconds=nan) should have a number of seconds",
        ),
        (mark.ddp(fresh_ranks=1), "(fresh_ranks=1) should have True or False"),
        (mark.ddp(dead_line=1), "(dead_line=1) should have name=value with one of deadline"),
    ],
)
def test_a_wrong_marker_is_told_what_would_be_right(
    marker: pytest.MarkDecorator, says: str
) -> None:
    item: Any = SimpleNamespace(nodeid="test_a", iter_markers=lambda: [marker.mark])
    with pytest.raises(pytest.UsageError, match=re.escape(says)):
        check_markers(item)


def test_a_wrong_marker_is_refused_before_anything_runs(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.skip\n@pytest.mark.ddp(5)\ndef test_a():\n    pass\n"
    (tmp_path / "test_theirs.py").write_text(test)
    code, text = run(tmp_path)
    assert code == 4, text
    assert "test_a: @pytest.mark.ddp(5) should have name=value with one of deadline" in text
    assert "INTERNALERROR" not in text


def test_the_deadline_of_the_run_is_that_of_its_checks(their_repository: Path) -> None:
    (their_repository / "tests" / "test_slow.py").write_text(SLOW)
    code, text = run(their_repository, "--ddp-deadline=1", "tests/test_slow.py")
    assert code == 1
    assert "RanksTimedOut" in text
    assert "Not compared: ranks timed out" in text


def test_the_catalogue_splits_by_lane_marker(no_cuda: None) -> None:
    root = Path(__file__).parents[3]
    count = ["--collect-only", "-q", "tests/equivalence/test_manual_all_reduce.py"]
    code, text = run(root, *count, "-m", "not gloo_fallback and not data_parallel")
    assert code == 0, text
    assert "gloo_cuda]" in text
    assert "gloo_fallback]" not in text
