"""The report of every faulty step fits on a screen, names no other cause, and shows the line.

The steps were written in eleven sets of 16 to 40 by authors who knew none of the causes. Of a dozen
steps, whose reports say what all others say as well, the whole report is kept as it is without
trials of edits. Write them anew with UPDATE_GOLDEN=1 in the environment.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_equivalence.report.verdict import Verdict
from tests.faulty_steps.keys import HERE, KEYS, STEPS, is_shown, verdict_of
from tests.package.report.golden_files import stable, with_last_digits_of

REPORTS = HERE / "reports"

WRITTEN_WITH = "2.13."
"""The reports name operations of torch, which other versions of torch may split otherwise. Under
these only the first line of each report is held, beside its cause and the lines that it shows.
"""

MOST_LINES = 16
WIDEST = 100

NOT_SHOWN = frozenset(
    {
        "s22_recurrent_chunks",
        "s55_recomputed_decoder",
        "s64_two_level_mesh",
        "s72_partitioned_gradients",
        "s111_actor_critic",
        "s146_speech_by_length",
        "s152_partitioned_graph",
        "s158_split_attention",
        "s160_recorded_teacher",
        "s163_click_prediction",
        "s165_assays",
        "s166_classes_attract",
        "s168_reviews",
        "s169_self_paced",
        "s177_spoken_commands",
        "s179_averaged_weights",
        "s180_named_gradients",
        "s184_main_gradients",
        "s185_one_forward_one_backward",
        "s188_recordings_cut_in_time",
        "s190_remembered_reference",
        "s194_nodes_first",
        "s196_one_message",
        "s199_answers_only",
        "s206_graph_with_neighbours",
        "s220_heat_equation",
        "s223_toggled_optimizers",
        "s228_recipe",
        "s229_sigmoid_pairs",
        "s234_main_gradients",
        "s236_partly_frozen",
        "s239_cascade",
    }
)
"""The steps whose report shows other lines if no edits are tried."""

RACING = frozenset({"s79_overlapped_lm"})
"""The steps whose collectives race, so that what they leave is not twice the same."""


GOLDEN = frozenset(
    {
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
        "s186_normalised_together",  # the output of a module differs
        "s193_adapters_recomputed",  # a module runs without gradients
    }
)
"""The steps of which the whole report is held."""

steady_keys = pytest.mark.parametrize(
    "key",
    STEADY := [key for key in KEYS if Path(key["file"]).stem not in RACING],
    ids=[Path(key["file"]).stem for key in STEADY],
)


@pytest.mark.self_check
@pytest.mark.parametrize("stem", sorted(RACING))
def test_a_step_that_races_is_different_on_one_screen(
    stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _fits_on_a_screen(verdict_of(STEPS / f"{stem}.py", monkeypatch))


@steady_keys
@pytest.mark.self_check
def test_the_report_names_the_cause_and_shows_the_line_on_one_screen(
    key: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = STEPS / key["file"]
    verdict = verdict_of(path, monkeypatch)
    assert _fits_on_a_screen(verdict)
    # Torch prints a warning once in a process, so what ranks print depends on the checks before.
    text = stable(_without_repeating(str(replace(verdict, output={}))))
    assert (verdict.cause or "") == key.get("cause", ""), text
    assert is_shown(key, text) is (path.stem not in NOT_SHOWN), text
    if path.stem not in GOLDEN:
        return
    if os.environ.get("UPDATE_GOLDEN"):
        (REPORTS / f"{path.stem}.txt").write_text(text, "utf-8")
    kept = _as_held((REPORTS / f"{path.stem}.txt").read_text("utf-8"))
    assert with_last_digits_of(kept, _as_held(text)) == kept


def test_every_whole_report_is_of_a_step() -> None:
    assert {path.stem for path in REPORTS.glob("*.txt")} == GOLDEN


def _fits_on_a_screen(verdict: Verdict) -> bool:
    """True for a difference whose report has few and short lines. Reads the verdict."""
    assert verdict.outcome == "different"
    lines = str(verdict).splitlines()
    widths = [len(line) for line in lines if not line.startswith("  Again:")]
    return len(lines) <= MOST_LINES and max(widths) <= WIDEST


def _as_held(report: str) -> str:
    """What is held of a report: all of it under the torch with which it was written, and its first
    line under others.
    """
    return report if torch.__version__.startswith(WRITTEN_WITH) else report.splitlines()[0]


def _without_repeating(report: str) -> str:
    """The report without the command that repeats the test, which stands on one line or two."""
    return re.sub(r"(?m)^  Again: .*\n(  More: .*\n)?", "", report)
