"""Of the faulty steps, many are repaired by an edit of the faulty line.

A repair counts here only if it is written as in the key. In a run many more repair the step: other
ways to write the same, such as the world size from another place.
"""

from __future__ import annotations

import statistics

from benchmarks.steps.keys import KNOWN, keys_of, mended
from ddp_equivalence.diagnosis.repairs.edits import edits_of
from tests.package.diagnosis.repairs.edited import applied, written

EVERY = 8
REPAIRED = 8
"""So many of every eighth step are written as in the key with one of the edits, at least."""

# Edits of one faulty line: what they cost is what a report costs.
MOST_AT_THE_MEDIAN = 16
MOST_AT_THE_90TH_PERCENTILE = 34


def test_many_faulty_lines_are_repaired_and_have_few_edits() -> None:
    repaired, numbers = 0, []
    for key in keys_of(KNOWN)[::EVERY]:
        text = (KNOWN / key["file"]).read_text("utf-8")
        faulty = [key["line"], *key.get("also", [])]
        lines = {i for i, line in enumerate(text.splitlines(), 1) if line.strip() in faulty}
        edits = edits_of(key["file"], text, lines)
        right = written(mended(key, KNOWN))
        repaired += any(applied(edit, text) == right for edit in edits)
        numbers += [sum(edit.line == line for edit in edits) for line in lines]
    assert repaired >= REPAIRED
    assert statistics.median(numbers) <= MOST_AT_THE_MEDIAN
    assert statistics.quantiles(numbers, n=10)[-1] <= MOST_AT_THE_90TH_PERCENTILE
