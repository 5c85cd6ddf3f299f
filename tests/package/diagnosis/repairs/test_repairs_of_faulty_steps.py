"""Of the faulty steps, many are repaired by an edit of the faulty line.

A repair counts here only if it gives the syntax of the key. In a run many more repair the step:
other ways to write the same, such as the world size from another place.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.diagnosis.repairs.find_repairs import edits_of
from tests.faulty_steps.keys import KEYS, STEPS
from tests.package.diagnosis.repairs.edited import applied
from tests.package.diagnosis.repairs.same_syntax import same_syntax

# The steps whose repair is among the edits; a new one belongs here as soon as it is.
REPAIRED = {
    *(78, 145, 158),
    *(3, 4, 5, 7, 9, 10, 11, 14, 18, 22, 24, 25, 26, 27, 29, 30, 33, 34, 36, 38, 39, 42),
    *(43, 44, 47, 48, 49, 50, 51, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 72),
    *(77, 79, 82, 83, 84, 88, 89, 91, 93, 94, 98, 100, 103, 106, 107, 112, 113, 114, 116),
    *(117, 118, 119, 120, 122, 124, 125, 127, 128, 129, 133, 134, 137, 138, 140),
    *(146, 148, 149, 150, 152, 153, 154, 156, 157, 159, 161, 162, 163, 172, 173, 175),
    *(181, 183, 187, 188, 191, 192, 193, 195, 197, 199, 200, 206, 207, 209, 211, 217, 221),
    *(222, 226, 228, 229, 230, 232, 238),
}

# Edits of one faulty line: what they cost is what a report costs.
MOST_AT_THE_MEDIAN = 16
MOST_AT_THE_90TH_PERCENTILE = 34


@pytest.mark.parametrize("key", KEYS, ids=lambda key: Path(key["file"]).stem)
def test_the_steps_that_are_repaired_are_those_in_the_list(key: dict[str, Any]) -> None:
    text, lines = _faulty_lines(key)
    repaired = same_syntax(text.replace(key["find"], key["replace"]))
    edited = {same_syntax(applied(edit, text)) for edit in edits_of(key["file"], text, lines)}
    number = int(key["file"].partition("_")[0].removeprefix("s"))
    assert (repaired in edited) == (number in REPAIRED)


def test_a_faulty_line_has_few_edits() -> None:
    numbers = []
    for key in KEYS:
        text, lines = _faulty_lines(key)
        edits = edits_of(key["file"], text, lines)
        numbers += [sum(edit.line == line for edit in edits) for line in lines]
    assert statistics.median(numbers) <= MOST_AT_THE_MEDIAN
    assert statistics.quantiles(numbers, n=10)[-1] <= MOST_AT_THE_90TH_PERCENTILE


def test_the_same_syntax_in_other_words() -> None:
    assert same_syntax("a * rank.world_size / b") == same_syntax("dist.get_world_size() * (a / b)")
    assert same_syntax("if True:\n    a\n    pass\nb") == same_syntax("a\nb")
    assert same_syntax("a / b") != same_syntax("b / a")
    assert same_syntax("a - b") != same_syntax("b - a")


def _faulty_lines(key: dict[str, Any]) -> tuple[str, set[int]]:
    text = (STEPS / key["file"]).read_text("utf-8")
    faulty = [key["line"], *key.get("also", [])]
    return text, {i for i, line in enumerate(text.splitlines(), 1) if line.strip() in faulty}
