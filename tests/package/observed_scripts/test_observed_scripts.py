"""Training scripts as they are: what ``observe`` says of right ones and of broken ones."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence import NothingCompared, observe
from ddp_equivalence.commands.main import main
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.observed_scripts import launch
from ddp_equivalence.observed_scripts.judged_step import MARKED
from ddp_equivalence.observed_scripts.oracle import SECONDS_OF_KEPT
from ddp_equivalence.observed_scripts.report import as_json
from ddp_equivalence.report.render import line_to_look_at
from tests.combinations import one_of_each
from tests.package.forks import started
from tests.package.observed_scripts.observing import (
    SCRIPTS,
    observed,
    outcomes,
    script,
    source_of_fault,
)

FLUSHES = "accumulating.py flushes --micro-batches 4"
"""An epoch has 30 batches, and its last step the two that are left."""

AT_END: dict[str, Any] = {"from_step": 6, "steps": 2}


CHOSEN: list[Any] = [
    # The weight of the loss of this script is the number of the step.
    ("tagger.py", {"from_step": 2, "steps": 2}, "same same", "2 steps on 2 ranks"),
    # A layer computes in float32, and has its limit.
    ("classifier.py standardised", {"steps": 1}, "same", "1 step on 2 ranks"),
    ("classifier.py standardised times", {"steps": 1}, "different", "sum, not a mean"),
    (
        FLUSHES,
        {"steps": 1},
        "same",
        "the last step of an epoch, which may have 2 micro-batches instead of 4, was not "
        "observed: --from-step 6 observes it",
    ),
    (f"{FLUSHES} unreduced", AT_END, "same different", "[no_sync_left_on]"),
    (f"{FLUSHES} by_length", AT_END, "same unknown", "It may be the length of the loader"),
    # A full step at the end of an epoch stays in that epoch.
    ("accumulating.py by_epoch", {"from_step": 9, "steps": 1}, "same", "1 step on 2 ranks"),
    # It may end before the last step that was to be recorded.
    ("varying.py two_steps", {}, "same same", "2 steps on 2 ranks"),
    ("varying.py two_steps attribute uneven", {}, "different different", "Steps: 1, 2 diff"),
    ("ends_early.py uneven", {"steps": 2}, "same same", "(4 on rank 0, 3 on rank 1)"),
]


@pytest.mark.parametrize(("command", "options", "expected", "text"), one_of_each(script, CHOSEN))
def test_the_steps_that_were_chosen_are_judged(
    command: str, options: dict[str, Any], expected: str, text: str
) -> None:
    found = observed(*command.split(), **options)
    assert outcomes(found) == expected.split(), str(found)
    assert text in " ".join(found.full_report().split())


def test_the_end_of_an_epoch_is_another_step_and_can_be_observed() -> None:
    end = observed(*FLUSHES.split(), **AT_END)
    assert outcomes(end) == ["same", "same"], str(end)
    assert [facts.micro_batches for facts in end.facts] == [4, 2]
    assert not end.notes


@pytest.mark.parametrize(
    ("command", "plant", "because", "text"),
    [
        ("classifier.py zero", "", UnknownBecause.REFERENCE_IS_ZERO, "so is its loss"),
        pytest.param(
            "adversarial.py constant",
            "",
            UnknownBecause.CANNOT_REPLAY,
            "with 16 rows in one process, and with 24 on all ranks",
            id="it does not take the rows that it is given",
        ),
        pytest.param(
            "classifier.py by_rank",
            "",
            UnknownBecause.CANNOT_REPLAY,
            "called its model with other values than that rank",
            id="it changes its rows by rank",
        ),
        pytest.param(
            "detector.py counts moody",
            "",
            UnknownBecause.CANNOT_REPLAY,
            "does not compute again",
            id="one process does not repeat its loss",
        ),
        pytest.param(
            "classifier.py unwrapped",
            "sum_not_mean",
            UnknownBecause.PLANTED_FAULT_NEVER_FIRED,
            "never reached the place",
            id="a planted fault never fires",
        ),
    ],
)
def test_where_nothing_is_shown_the_verdict_is_unknown(
    command: str, plant: str, because: UnknownBecause, text: str
) -> None:
    found = observed(*command.split(), steps=1, plant=plant)
    assert found.verdict.unknown_because is because, str(found)
    assert text in found.verdict.reason
    with pytest.raises(NothingCompared):
        found.assert_equivalent()


NAMED: list[Any] = [
    ("classifier.py frozen", {}, "parameter_frozen_on_one_rank", "frozen on rank 1 only"),
    ("classifier.py reduced_last", {}, "clipped_before_reduce", "Fits every element."),
    ("classifier.py group_of_one by_hand", {}, "reduced_in_wrong_group", "in groups"),
    ("classifier.py teacher by_hand", {}, "weights_differ_between_ranks", "of Linear differ"),
    # The line calls the model, and is watched in the middle of it.
    (
        "class_weights.py",
        {},
        "token_counts_weighted_equally",
        "counts that are not those of its examples (by rank:",
    ),
    # CUDA devices are the CPU.
    (
        "classifier.py group_of_one",
        {"as_cpu": 2},
        "reduced_in_wrong_group",
        "in groups {0} and {1}",
    ),
    # It has too few steps for more questions, and is started again.
    ("classifier.py weighed short", {}, "statistic_not_additive", "a rank has only its own"),
    ("classifier.py", {"plant": "sum_not_mean"}, "sum_not_mean", "planted in the ranks"),
    # Micro-batches are divided among two ranks, of which no mean is half of the sum.
    ("language_model.py", {"plant": "averaged_twice"}, "averaged_twice", "planted in the ranks"),
    # A scale that only the ranks have is clipped with the gradients.
    (
        "classifier.py",
        {"plant": "gradient_scaled_not_unscaled"},
        "clipped_while_scaled",
        "planted in the ranks",
    ),
]


@pytest.mark.parametrize(
    ("command", "options", "cause", "text"), one_of_each(lambda row: (script(row), *row[1]), NAMED)
)
def test_a_report_names_the_cause_and_says_what_was_seen(
    command: str, options: dict[str, Any], cause: str, text: str
) -> None:
    found = observed(*command.split(), steps=1, **options)
    assert (found.outcome, found.cause) == ("different", cause), str(found)
    assert text in " ".join(str(found).split())


def test_a_script_that_always_takes_the_same_port_is_watched_too() -> None:
    """The one process, which still runs then, has to leave the port to the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = observed("fixed_port.py", str(port), steps=1)
    assert found.cause == "sum_not_mean"
    assert source_of_fault(found).startswith("(model(rows).square().mean() * world_size)")


def test_without_float64_the_limit_is_that_of_the_precision_of_the_script() -> None:
    found = observed("classifier.py", precision="own", steps=1)
    assert (found.outcome, found.float64) == ("same", False)
    limit = found.verdict.limit
    assert limit is not None
    assert 1e-6 < limit < 1e-4
    broken = observed("classifier.py", "times", precision="own", steps=1)
    assert (broken.outcome, broken.cause) == ("different", "sum_not_mean")


def test_flat_shows_what_accumulation_does_to_one_process_too() -> None:
    command = f"{sys.executable} accumulating.py --nprocs 1 --micro-batches 1"
    right = observed("accumulating.py", flat=command, steps=1)
    assert right.outcome == "same"
    wrong = observed("accumulating.py", "undivided", flat=command, steps=1)
    assert (wrong.outcome, wrong.cause) == ("different", "accumulation_not_divided")
    without_flat = observed("accumulating.py", "undivided", steps=1)
    assert without_flat.outcome == "same"  # one process accumulates in the same way


def test_rows_that_several_ranks_have_read_are_counted() -> None:
    """The gradients of these steps are right, but some rows count twice in an epoch."""
    found = observed("classifier.py", "apart", steps=6)
    assert found.outcome == "same", str(found)
    (note,) = [one for one in found.notes if "more than one rank" in one]
    assert re.match(r"\d+ of \d+ different rows were read by more than one rank\. Unless ", note)
    assert not [
        one for one in observed("classifier.py", steps=6).notes if "more than one rank" in one
    ]


def test_the_command_prints_the_report_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setattr(launch, "start", started)
    path = tmp_path / "results.json"
    command = [sys.executable, "classifier.py", "times", "--nprocs", "2"]
    code = main(["observe", "--steps", "1", "--json", str(path), "--", *command])
    assert code == 1
    report = capsys.readouterr().out
    assert "gradients are a sum, not a mean" in report
    assert len(report.splitlines()) <= 16
    found = json.loads(path.read_text())
    assert (found["outcome"], found["cause"]) == ("different", "sum_not_mean")
    assert found["steps"][0]["lines"][0]["file"].endswith("classifier.py")


def test_a_step_that_differs_is_written_as_files_that_stand_alone(tmp_path: Path) -> None:
    found = observed("classifier.py", "times", steps=1, export=tmp_path / "files")
    assert "--export DIR writes the first step that differs" in found.full_report()
    command = [sys.executable, str(tmp_path / "files" / "compare.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "gradients are a sum, not a mean" in shown[0]
    compared = [line for line in shown if "nearest multiple" in line]
    assert len(compared) == 8  # four parameters on two ranks
    assert all(line.endswith(": error 1, nearest multiple 2") for line in compared)


def test_no_temporary_file_of_a_script_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended at a step, before it deletes what it has made."""
    (tmp_path / "files").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "files"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))  # torch makes it
    assert observed("classifier.py", steps=1).outcome == "same"
    assert list((tmp_path / "files").iterdir()) == []


def test_what_a_script_writes_stays_out_of_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "start", started)
    (tmp_path / "weights.pt").write_text("the user's own")
    shutil.copy(SCRIPTS / "start.py", tmp_path)
    script = (SCRIPTS / "classifier.py").read_text()
    steps = script.replace("optimizer.step()", "optimizer.step()\n        write(net)")
    (tmp_path / "writer.py").write_text(steps.replace("def train(", f"{WRITER}def train("))
    command = (sys.executable, "writer.py", "--nprocs", "2")
    found = observe(command, folder=tmp_path, steps=2, keep=tmp_path / "kept")
    assert found.outcome == "same"
    assert (tmp_path / "weights.pt").read_text() == "the user's own"
    assert not (tmp_path / "log.txt").exists()
    assert list((tmp_path / "kept").rglob("working_folder/log.txt"))


WRITER = """def write(net):
    torch.save(net.state_dict(), "weights.pt")
    with open("log.txt", "a") as file:
        file.write("a step")


"""


def test_lines_of_a_module_that_is_run_by_its_name_are_those_of_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "start", started)
    package = tmp_path / "own"
    package.mkdir()
    for name in ("start.py", "classifier.py"):
        shutil.copy(SCRIPTS / name, package)
    script = package / "classifier.py"
    script.write_text(script.read_text().replace("import start", "from own import start"))
    command = (sys.executable, "-m", "own.classifier", "times", "--nprocs", "2")
    found = observe(command, folder=tmp_path, steps=1)
    line = line_to_look_at(found.verdict)
    assert line is not None
    assert (line.file, found.cause) == (str(script.resolve()), "sum_not_mean")


def test_without_a_cause_the_line_is_marked_at_which_the_ranks_part_from_one_process() -> None:
    found = observed("classifier.py", "by_number", steps=2)
    assert (found.outcome, found.cause) == ("different", None)
    assert "in multiples of what their rows give: rank 0 1, rank 1 0.5." in str(found)
    assert "On one rank" not in str(found)  # one process is what the ranks are compared with
    line, *_ = [one for one in str(found).splitlines() if one.startswith("> ")]
    assert line.endswith("loss = loss / (1 + dist.get_rank())")
    full = found.full_report()
    assert full.count("different: classifier.py") == 1
    assert "step 1 of 2 (AdamW) is not what one process computes: no known cause fits" in full
    assert full.count("Only the first step that differs is explained.") == 1


def test_a_line_that_computes_otherwise_on_one_rank_is_marked_and_said_to_be() -> None:
    found = observed("classifier.py", "shifted", steps=1)
    assert (found.outcome, found.cause) == ("different", None)
    assert MARKED in str(found)
    assert source_of_fault(found).startswith("output = output + dist.get_rank()")


def test_a_fork_of_a_process_with_several_threads_answers() -> None:
    """A fork has no other threads, and would wait for them for ever."""
    started = time.monotonic()
    found = observed("varying.py", "random", "uneven", "threads")
    assert outcomes(found) == ["different"] * 3, str(found)
    assert time.monotonic() - started < SECONDS_OF_KEPT, "no fork ran into its deadline"


# --- ranks that draw the same random numbers for their rows


@pytest.mark.parametrize(
    ("words", "dropout", "line"),
    [
        pytest.param("alike", True, "else model(inputs)", id="masks of dropout"),
        pytest.param("alike noise", False, "torch.randn(", id="noise"),
    ],
)
def test_ranks_that_draw_alike_are_told_and_the_step_stays_the_same(
    words: str, dropout: bool, line: str
) -> None:
    found = observed("classifier.py", *words.split(), steps=1, dropout=dropout)
    assert found.outcome == "same"
    ((file, number),) = (place.split(":") for place in found.draws_alike)
    assert line in (SCRIPTS / file).read_text().splitlines()[int(number) - 1]
    (warning,) = found.warnings
    assert "every rank draws the same random numbers for its rows" in warning
    for report in (str(found), found.full_report()):
        assert "Warning: every rank draws the same" in report
    assert as_json(found)["warnings"] == [warning]


@pytest.mark.parametrize(
    ("words", "dropout"), [("", True), ("alike", False), ("alike noise jointly", False)]
)
def test_ranks_may_draw_other_numbers_or_none_or_one_for_all_rows(
    words: str, dropout: bool
) -> None:
    found = observed("classifier.py", *words.split(), steps=1, dropout=dropout)
    assert (found.outcome, found.warnings) == ("same", ())


@pytest.mark.parametrize(("words", "code"), [("alike", 1), ("", 0)])
def test_strict_lets_a_warning_fail(
    words: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setattr(launch, "start", started)
    script = [sys.executable, "classifier.py", *words.split(), "--nprocs", "2"]
    assert main(["observe", "--steps", "1", "--strict", "--", *script]) == code
    assert ("Warning: " in capsys.readouterr().out) == bool(code)


# --- the forks in which these tests run scripts


@pytest.mark.parametrize(
    "words", ["classifier.py", pytest.param("classifier.py clip", marks=pytest.mark.thorough)]
)
def test_a_fork_gives_what_an_interpreter_gives_that_was_started(words: str) -> None:
    command = (sys.executable, *words.split(), "--nprocs", "2")
    with_processes = observe(command, folder=SCRIPTS, steps=1)
    assert with_processes.verdicts
    with_forks = observed(*words.split(), steps=1)
    assert without_seconds(str(with_forks)) == without_seconds(str(with_processes))


def without_seconds(report: str) -> list[str]:
    return [line for line in report.splitlines() if not line.strip().startswith("Seconds:")]
