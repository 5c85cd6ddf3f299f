"""Report text is code: every kind of report against its golden file.

After an intended change write the files anew and read the difference before you commit it:
``UPDATE_GOLDEN=1 pytest tests/package/report/test_report_text.py``.
"""

from __future__ import annotations

import pytest

from ddp_equivalence import check
from ddp_equivalence.case import settings
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import fault_trials
from ddp_equivalence.report.line import Style
from ddp_equivalence.report.render import report_lines
from tests.package.report.golden_files import assert_golden
from tests.package.report.report_cases import REPORTS, TOKENS


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_the_report_reads_as_its_golden_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.x")
    case, step, options = REPORTS[name]
    with settings.using(settings.Settings(backend="gloo")):
        report = str(check(case, step, **options))
    assert_golden(f"{name}.txt", report)


@pytest.mark.parametrize("name", FAULTS)
def test_the_report_of_a_planted_fault_reads_as_its_golden_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.x")
    layouts = ("1+3",) if name == "mean_of_node_means" else ("2x2",)
    trial = fault_trials([name], layouts, every=False)[0].trial
    with settings.using(settings.Settings(backend="gloo")), planted(name):
        report = str(check(trial.case, trial.strategy, **trial.options))
    assert_golden(f"planted/{name}.txt", report)


@pytest.mark.parametrize("width", [72, 140])
def test_a_report_is_set_in_the_width_it_is_given(width: int) -> None:
    verdict = check(TOKENS, "ddp_mean")
    with settings.using(settings.Settings(width=width)):
        lines = [line for line in str(verdict).splitlines() if not line.startswith("  Repeat:")]
    prose = [line for line in lines if line.startswith("  Evidence") or line.startswith("    ")]
    assert max(map(len, lines)) <= max(width, 96)
    assert any(width - 20 < len(line) <= width for line in prose)


@pytest.mark.parametrize(
    ("name", "style"),
    [("same", Style.GOOD), ("sum_not_mean", Style.BAD), ("left_nothing", Style.UNCERTAIN)],
)
def test_the_first_line_has_the_style_of_the_outcome(name: str, style: Style) -> None:
    case, step, options = REPORTS[name]
    verdict = check(case, step, **options)
    first, *rest = report_lines(verdict)
    assert first.style is style
    labels = [line.text[: line.styled] for line in rest if line.style is Style.LABEL]
    assert "  Case:" in labels
    assert {line.style for line in rest} == {Style.PLAIN, Style.LABEL}
