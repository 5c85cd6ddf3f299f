"""Report text is code: every kind of report against its golden file.

After an intended change write the files anew and read the difference before you commit it:
``UPDATE_GOLDEN=1 pytest -p no:randomly tests/package/report/test_report_text.py``.
"""

from __future__ import annotations

from functools import cache

import pytest

from ddp_equivalence import Verdict, check
from ddp_equivalence.case import settings
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import fault_trials
from ddp_equivalence.report.render import full_lines, report_lines
from ddp_equivalence.report.text import Style
from tests.diagnosis.names.claims import false_claims
from tests.package.report.golden_files import assert_golden
from tests.package.report.report_cases import REPORTS, TOKENS

MOST_LINES = 16
WIDTH = 100

FULL_REPORTS = ("sum_not_mean", "unnamed_reduction")
"""Of these the whole report has a golden file, with the causes that were ruled out. The files of
all others stay as they are when a cause is added."""


@cache
def verdict_of(name: str) -> Verdict:
    case, step, options = REPORTS[name]
    own = not isinstance(step, str)
    repeat = f"ddp-equivalence check report_cases.py:{name}" if own else ""
    with settings.using(settings.Settings(trial_seconds=0, backend="gloo", repeat=repeat)):
        return check(case, step, **options)


def verdict_of_planted(name: str) -> Verdict:
    layouts = ("1+3",) if name == "mean_of_node_means" else ("2x2",)
    trial = fault_trials([name], layouts, every=False)[0].trial
    with settings.using(settings.Settings(trial_seconds=0, backend="gloo")), planted(name):
        return check(trial.case, trial.strategy, **trial.options)


def rows_on_a_terminal(report: str, width: int) -> int:
    return sum(max(1, -(-len(line) // width)) for line in report.splitlines())


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_the_report_reads_as_its_golden_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.x")
    verdict = verdict_of(name)
    with settings.using(settings.Settings(trial_seconds=0)):
        report = str(verdict)
    assert_golden(f"{name}.txt", report)
    assert verdict.outcome != "different" or rows_on_a_terminal(report, WIDTH) <= MOST_LINES


@pytest.mark.parametrize("name", FAULTS)
def test_the_report_of_a_planted_fault_reads_as_its_golden_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.x")
    verdict = verdict_of_planted(name)
    with settings.using(settings.Settings(trial_seconds=0)):
        report, full = str(verdict), verdict.full_report()
    assert_golden(f"planted/{name}.txt", report)
    assert rows_on_a_terminal(report, WIDTH) <= MOST_LINES
    assert false_claims(verdict, f"{report}\n{full}") == [], full


@pytest.mark.parametrize("name", FULL_REPORTS)
def test_the_full_report_reads_as_its_golden_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.x")
    verdict = verdict_of(name)
    with settings.using(settings.Settings(trial_seconds=0)):
        assert_golden(f"full/{name}.txt", verdict.full_report())


@pytest.mark.parametrize("name", ["same", "left_nothing"])
def test_the_full_report_of_a_verdict_that_is_not_different_is_its_report(name: str) -> None:
    verdict = verdict_of(name)
    assert verdict.full_report() == str(verdict)


@pytest.mark.parametrize("width", [72, 140])
def test_a_report_is_set_in_the_width_it_is_given(width: int) -> None:
    verdict = check(TOKENS, "ddp_mean")
    with settings.using(settings.Settings(trial_seconds=0, width=width)):
        full = [line.text for line in full_lines(verdict)]
        short = str(verdict).splitlines()
    lines = [line for line in full if not line.startswith(("  Repeat:", "  Again:"))]
    prose = [line for line in lines if line.startswith("  Evidence") or line.startswith("    ")]
    assert max(map(len, lines)) <= max(width, 96)
    assert any(width - 20 < len(line) <= width for line in prose)
    assert len(short[0]) <= min(width, WIDTH)


@pytest.mark.parametrize(
    ("name", "style"),
    [("same", Style.GOOD), ("sum_not_mean", Style.BAD), ("left_nothing", Style.UNCERTAIN)],
)
def test_the_first_line_has_the_style_of_the_outcome(name: str, style: Style) -> None:
    verdict = verdict_of(name)
    for lines in (list(report_lines(verdict)), list(full_lines(verdict))):
        first, *rest = lines
        assert first.style is style
        labels = {line.text[: line.styled] for line in rest if line.style is Style.LABEL}
        assert labels & {"  Case:", "  More:", "  Again:"}
        assert {Style.PLAIN, Style.LABEL} <= {line.style for line in rest}
