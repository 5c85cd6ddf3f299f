"""What reports, annotations and results say of edits that repair a step."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_equivalence import Verdict, check
from ddp_equivalence.case import settings
from ddp_equivalence.commands.main import main
from ddp_equivalence.commands.user_file import load
from ddp_equivalence.diagnosis.repairs import find_repairs
from ddp_equivalence.diagnosis.repairs.find_repairs import Repair, Repairs
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.report.record import record_of
from ddp_equivalence.report.render import pointed_lines
from tests.package.own_cases import loss, own_case
from tests.package.report.report_cases import USER_FILE

OWN_FILE = f"""\
{USER_FILE.replace("2x2", "1x2")}def step(model, shard, rank):
    loss(model, shard).backward()
    for number, parameter in enumerate(model.parameters()):
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size + number * rank.rank + number
"""
FAULTY = "parameter.grad /= rank.world_size + number * rank.rank + number"
LINE = OWN_FILE.splitlines().index(f"        {FAULTY}") + 1
LONG = "parameter.grad /= (" + " + ".join(["rank.world_size"] * 30) + ")"


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(find_repairs, "_spent", 0.0)
    path = tmp_path / "own.py"
    path.write_text(OWN_FILE)
    return path


def repaired(verdict: Verdict, repairs: Repairs) -> Verdict:
    assert verdict.analysis is not None
    verdict.analysis.repairs = repairs
    return verdict


@pytest.fixture
def verdict(own_file: Path) -> Verdict:
    """A difference without a cause, and without trials."""
    own = load(own_file, "step")
    found = check(own.case, own.step)
    assert found.outcome == "different"
    return found


def test_the_command_shows_the_edited_line_and_annotates_it(
    own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(own_file), "--github", "--trial-seconds", "20"]) == 1
    printed = capsys.readouterr().out
    report, _, annotation = printed.partition("::error ")
    assert len(report.strip().splitlines()) <= 16
    lines = [line for line in report.splitlines() if "Again:" not in line]
    assert max(map(len, lines)) <= 100
    marked = [line for line in report.splitlines() if line.startswith("> ")]
    assert [f"own.py:{LINE}" in line for line in marked] == [True]
    assert f"Tried: line {LINE} with `" in report
    assert "--trial-seconds 20" in report.partition("Again:")[2]
    assert f"line={LINE}" in annotation


def test_a_check_is_repeated_without_options_that_were_not_given(
    own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with settings.using(settings.replaced(trial_seconds=0.0)):
        assert main(["check", str(own_file)]) == 1
    assert "trial-seconds" not in capsys.readouterr().out


def test_the_results_in_json_hold_the_repairs(verdict: Verdict, own_file: Path) -> None:
    repair = _repair(verdict, FAULTY, "parameter.grad /= rank.world_size")
    verdict = repaired(verdict, Repairs((repair,), 1, 5, 9))
    record = record_of(verdict, "id", "same", "", with_floor=False, with_report=True)
    (found,) = json.loads(json.dumps(asdict(record)))["repairs"]
    assert (found["file"], found["line"]) == (str(own_file), LINE)
    assert found["change"].startswith("with `parameter.grad /= rank.world_size` in place of")
    assert record.line == LINE
    without = record_of(repaired(verdict, Repairs()), "id", "same", "", with_floor=False)
    assert without.repairs == ()


def _repair(verdict: Verdict, before: str, after: str) -> Repair:
    assert verdict.asked.defined_at is not None
    line = CodeLine(verdict.asked.defined_at.file, LINE, "step")
    return Repair(line, before, after)


def test_of_long_code_what_an_edit_changes_is_shown(verdict: Verdict) -> None:
    before = LONG.replace("world_size)", "world_size - 1)")
    assert _repair(verdict, before, LONG).text == (
        "with `...size + rank.world_size + rank.world_size)` in place of "
        "`...size + rank.world_size + rank.world_size - 1)`"
    )


@pytest.mark.parametrize(("before", "after"), [(FAULTY, LONG), (LONG, "x"), ("a\n  +\n b", LONG)])
@pytest.mark.parametrize("count", [1, 5])
def test_a_report_fits_on_a_screen_with_long_code(
    verdict: Verdict, before: str, after: str, count: int
) -> None:
    one = _repair(verdict, before, after)
    lines = [replace(one, line=replace(one.line, number=LINE - away)) for away in range(count)]
    text = str(repaired(verdict, Repairs(tuple(lines), count, 700, 900))).splitlines()
    assert len(text) <= 16
    assert max(len(line) for line in text if "Again:" not in line) <= 100  # that is never broken
    assert [f"own.py:{LINE}" in line for line in text if line.startswith("> ")] == [True]


def test_of_edited_lines_beside_each_other_one_is_shown_before_lines_far_away(
    verdict: Verdict,
) -> None:
    repair = _repair(verdict, FAULTY, "parameter.grad /= rank.world_size")
    beside, far = LINE - 1, 1
    found = [replace(repair, line=replace(repair.line, number=n)) for n in (LINE, beside)]
    assert verdict.analysis is not None
    where = verdict.analysis.localisation.whereabouts
    assert where is not None
    other = PointedLine(replace(repair.line, number=far), "far away")
    where = replace(where, lines=(other,))
    verdict.analysis.localisation = replace(verdict.analysis.localisation, whereabouts=where)
    repairs = Repairs(tuple(found), 2, 5, 9)
    shown = pointed_lines(repaired(verdict, repairs))
    assert [one.line.number for one in shown] == [LINE, far, beside]
    assert repairs.text.startswith(f"line {LINE} with ")
    assert repairs.text.endswith("Of 5 changes tried, 2 repaired the step")
    # What was seen far away is not what is wrong, so the headline does not say it either.
    assert f"a change in line {LINE} makes all gradients right" in str(verdict).partition("\n\n")[0]


def test_edits_of_several_lines_take_the_mark_from_another_one_and_are_the_headline(
    verdict: Verdict,
) -> None:
    repair = _repair(verdict, FAULTY, "parameter.grad /= rank.world_size")
    first, second, other = LINE, LINE - 10, LINE - 1
    found = [replace(repair, line=replace(repair.line, number=n)) for n in (first, second)]
    assert verdict.analysis is not None
    where = verdict.analysis.localisation.whereabouts
    assert where is not None
    marked = PointedLine(replace(repair.line, number=other), "seen here", is_fault=True)
    where = replace(where, lines=(marked,), sentence="It is line 1.", marks="")
    verdict.analysis.localisation = replace(verdict.analysis.localisation, whereabouts=where)
    verdict = repaired(verdict, Repairs(tuple(found), 2, 5, 9))
    shown = pointed_lines(verdict)
    assert [(one.line.number, one.is_fault) for one in shown[:2]] == [
        (first, False),
        (second, False),
    ]
    assert not any(one.is_fault for one in shown)
    text = " ".join(str(verdict).split())
    assert f"a change in line {first} or {second} makes all gradients right" in text
    assert "It is line 1." not in text
    assert "tried with" not in text  # "Tried" says it
    # An edit of the marked line itself speaks for the mark.
    also = Repairs((replace(repair, line=marked.line), found[1]), 2, 5, 9)
    assert [one.line.number for one in pointed_lines(repaired(verdict, also)) if one.is_fault] == [
        other
    ]


def test_nothing_is_said_of_marks_that_an_edited_line_has_taken(verdict: Verdict) -> None:
    assert verdict.analysis is not None
    where = verdict.analysis.localisation.whereabouts
    assert where is not None
    where = replace(where, is_right_alone=None, marks="> marks something.")
    verdict.analysis.localisation = replace(verdict.analysis.localisation, whereabouts=where)
    assert "> marks something." in str(verdict)
    repair = _repair(verdict, FAULTY, "parameter.grad /= rank.world_size")
    assert "> marks something." not in str(repaired(verdict, Repairs((repair,), 1, 5, 9)))


@pytest.mark.parametrize(
    ("repairs", "sentence"),
    [
        (Repairs(tried=7, of=7), "7 small edits of the lines that the step runs; none of them"),
        (Repairs(tried=1, of=9), "1 of 9 small edits of the lines that the step runs; none"),
        (Repairs(why_not="open 'x' for writing"), "no edits of the step, because: open 'x' for"),
    ],
)
def test_the_full_report_says_what_was_tried(
    verdict: Verdict, repairs: Repairs, sentence: str
) -> None:
    full = " ".join(repaired(verdict, repairs).full_report().split())
    assert f"Tried: {sentence}" in full
    assert "Tried:" not in repaired(verdict, Repairs()).full_report()


def test_a_step_whose_cause_was_seen_has_no_trials() -> None:
    with settings.using(settings.replaced(trial_seconds=10.0)):
        found = check(own_case(), _not_reduced)
    assert found.cause == "no_all_reduce"
    assert found.findings[0].lines
    assert found.repairs == Repairs()


def _not_reduced(model, shard, rank):  # type: ignore[no-untyped-def]
    loss(model, shard).backward()


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_bad_seconds_of_the_command_are_a_clear_error(
    value: str, own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(own_file), f"--trial-seconds={value}"]) == 2
    error = capsys.readouterr().err
    told = f"--trial-seconds is {float(value)}; it should be a number of seconds, or 0 for no"
    assert told in error


def all_but_two_are_changed(model, shard, rank):  # type: ignore[no-untyped-def]
    loss(model, shard).backward()
    for number, parameter in enumerate(model.parameters()):
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
        parameter.grad += (number > 1) * parameter.detach()


def test_names_that_only_a_sentence_has_which_is_not_shown_are_told_beside_the_numbers() -> None:
    with settings.using(settings.replaced(trial_seconds=0.0)):
        verdict = check(own_case(), all_but_two_are_changed)
    assert verdict.cause is None, str(verdict)
    assert verdict.comparison is not None
    names = [one.name for one in verdict.comparison.differing]
    assert len(names) == 2
    assert verdict.analysis is not None
    where = verdict.analysis.localisation.whereabouts
    assert where is not None
    where = replace(where, sentence=f"It is about {', '.join(names)}.")
    verdict.analysis.localisation = replace(verdict.analysis.localisation, whereabouts=where)
    beside = f"(in {', '.join(names)}; all other parameters are right)"
    assert beside not in str(verdict)
    repair = _repair(verdict, FAULTY, "parameter.grad /= rank.world_size")
    text = str(repaired(verdict, Repairs((repair,), 1, 5, 9)))
    assert "It is about" not in text
    assert beside in text
