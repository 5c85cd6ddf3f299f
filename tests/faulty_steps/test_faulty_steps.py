"""Reports on faulty steps fit on a screen, name no other cause, and show the faulty line.

told.txt holds of each of the 240 steps of benchmarks/steps/known, without trials of edits, what its
report tells: the cause, or where the difference is, and whether the faulty line is shown. Of each
kind of report, one step runs in every change; those of a dozen are held as a whole. Write these
files anew with UPDATE_GOLDEN=1 in the environment and without xdist.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.steps.keys import (
    KNOWN,
    fits_on_a_screen,
    is_shown,
    keys_of,
    lines_near,
    mended,
    verdict_of,
)
from ddp_equivalence.report.verdict import Verdict
from tests.combinations import one_of_each
from tests.diagnosis.names.claims import false_claims
from tests.package.report.golden_files import stable, with_last_digits_of

pytestmark = pytest.mark.self_check

KEYS = {Path(key["file"]).stem: key for key in keys_of(KNOWN)}

REPORTS = Path(__file__).parent / "reports"
TOLD = Path(__file__).parent / "told.txt"
HELD = dict(line.split(": ", 1) for line in TOLD.read_text("utf-8").splitlines())

WRITTEN_WITH = "2.13."
"""The reports name operations of torch, which other versions of torch may split otherwise. Under
these only the first line of each report is held, beside its cause and the lines that it shows.
"""

OTHER_LINES = {"s163_click_prediction"}
"""The steps whose report shows other lines than the faulty one if no edits are tried."""

GOLDEN = (
    "s01_flat_buffer_trainer",  # a line makes other numbers of the gradients
    "s02_bucketed_reducer",  # parameter_not_reduced
    "s17_embeddings_outside_ddp",
    "s39_moving_average",  # a gradient is missing
    "s61_language_adapters",  # on some ranks
    "s64_two_level_mesh",  # reduced in groups
    "s112_gradient_statistics",
    "s136_two_optimizers",  # right gradients are changed afterwards
    "s148_instruction_tuning",  # backward drops a gradient
    "s163_click_prediction",  # the mean of right parts is not the big batch
    "s186_normalised_together",  # a loss is not that of the rows
    "s193_adapters_recomputed",  # a module runs without gradients
)

RACES = "s79_overlapped_lm"
"""Ranks that race leave other numbers in each run, which may have another cause."""

FOUND_BY_EDITS = ("s149_group_relative_policy", "s196_one_message", "s220_heat_equation")
"""Steps whose edits are found in a few seconds."""


def test_every_step_has_a_key_that_points_to_one_place() -> None:
    assert {path.stem for path in KNOWN.glob("*.py")} == set(KEYS)
    for key in KEYS.values():
        assert mended(key, KNOWN)
        lines = [line.strip() for line in (KNOWN / key["file"]).read_text("utf-8").splitlines()]
        assert [
            line for line in (key["line"], *key.get("also", [])) if lines.count(line) != 1
        ] == []


def told(verdict: Verdict, text: str, key: dict[str, Any]) -> str:
    """Whether the line is shown, the cause or the place, and what the step is on one rank."""
    shown = "the line is shown" if is_shown(key, text, KNOWN) else "other lines are shown"
    if verdict.cause is not None:
        return f"{shown}; {verdict.cause}"
    where = verdict.localisation.whereabouts
    if where is None:
        return f"{shown}; nothing is known of it"
    # Numbers, and the rank that is taken as an example, are no part of the kind of a report.
    headline = re.sub(r"-?\d+(\.\d+)?(e-\d+)?|nan|rank \d|every rank", "#", where.headline)
    return f"{shown}; {where.kind}; {headline}; {where.beside_one_rank}"


def kind(stem: str) -> tuple[str, ...]:
    """The cause, or where the difference is and what is said of it first."""
    return tuple(HELD.get(stem, stem).split("; ")[1:3])


GOLDEN_FIRST = [*GOLDEN, *sorted(KEYS.keys() - {RACES, *GOLDEN})]


@pytest.mark.parametrize("stem", one_of_each(kind, GOLDEN_FIRST))
def test_the_report_tells_the_cause_or_the_place_and_nothing_that_was_not_seen(stem: str) -> None:
    # Torch prints a warning once in a process, so what ranks print depends on the checks before.
    verdict = replace(verdict_of(KNOWN / KEYS[stem]["file"]), output={})
    text = str(verdict)
    assert verdict.outcome == "different"
    assert fits_on_a_screen(text)
    assert false_claims(verdict, f"{text}\n{verdict.full_report()}") == [], text
    held = told(verdict, text, KEYS[stem])
    if os.environ.get("UPDATE_GOLDEN"):
        HELD[stem] = held
        TOLD.write_text(
            "".join(f"{stem}: {HELD[stem]}\n" for stem in KEYS if stem in HELD), "utf-8"
        )
    assert held == HELD[stem], text
    if stem in GOLDEN:
        assert_golden(stem, verdict)


def assert_golden(stem: str, verdict: Verdict) -> None:
    """The report is as it is held, names the cause, and shows the line."""
    text = stable(_without_repeating(str(verdict)))
    assert (verdict.cause or "") == KEYS[stem].get("cause", ""), text
    assert is_shown(KEYS[stem], text, KNOWN) is (stem not in OTHER_LINES), text
    if os.environ.get("UPDATE_GOLDEN"):
        (REPORTS / f"{stem}.txt").write_text(text, "utf-8")
    kept = _as_held((REPORTS / f"{stem}.txt").read_text("utf-8"))
    assert with_last_digits_of(kept, _as_held(text)) == kept


@pytest.mark.parametrize("stem", GOLDEN)
def test_the_mended_step_is_the_same(stem: str, tmp_path: Path) -> None:
    path = tmp_path / f"mended_{stem}.py"
    path.write_text(mended(KEYS[stem], KNOWN), "utf-8")
    verdict = verdict_of(path)
    assert verdict.outcome == "same", str(verdict)


def test_a_step_that_races_is_different_on_one_screen() -> None:
    verdict = verdict_of(KNOWN / f"{RACES}.py")
    assert verdict.outcome == "different"
    assert fits_on_a_screen(str(verdict))


@pytest.mark.parametrize("stem", one_of_each(lambda stem: True, FOUND_BY_EDITS))
def test_an_edit_of_the_faulty_line_is_found(stem: str) -> None:
    key: dict[str, Any] = KEYS[stem]
    verdict = verdict_of(KNOWN / key["file"], trials=60)
    assert verdict.outcome == "different"
    assert verdict.repairs.shows_the_fault, str(verdict)
    first = verdict.repairs.found[0]
    assert first.line.number in lines_near(key, KNOWN), str(verdict)
    text = str(verdict)
    assert fits_on_a_screen(text)
    assert f":{first.line.number}  " in text
    assert f"  Tried: line {first.line.number} " in text


def _as_held(report: str) -> str:
    return report if torch.__version__.startswith(WRITTEN_WITH) else report.splitlines()[0]


def _without_repeating(report: str) -> str:
    """The report without the command that repeats the test, which stands on one line or two."""
    return re.sub(r"(?m)^  Again: .*\n(  More: .*\n)?", "", report)
