"""Ranks that draw the same random numbers for their rows."""

from __future__ import annotations

import sys

import pytest

from ddp_equivalence.commands.main import main
from ddp_equivalence.observed_scripts import launch
from ddp_equivalence.observed_scripts.report import as_json
from tests.package.observed_scripts.interpreters import started
from tests.package.observed_scripts.observing import SCRIPTS, observed


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
