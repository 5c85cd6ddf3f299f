"""Some examples of the big batch were read by no rank."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.examples_read import (
    example_numbers,
    examples_seen,
    predictions_from_examples_read,
    read_by_no_rank,
    read_more_than_once,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, indication_if
from ddp_equivalence.diagnosis.lines import of_data
from ddp_equivalence.diagnosis.lines.of_data import (
    lines_of_wrong_samplers,
    lines_that_leave_out,
    lines_that_replace_rows,
    with_reads,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The gradient of the examples read, if some were not read and none was read twice, or if a
    collective gave ranks the rows of others.
    """
    if view.observed.examples_read is None:
        return ()
    if read_more_than_once(view) and not lines_that_replace_rows(view):
        return ()
    dropped = read_by_no_rank(view)
    if not dropped:
        return ()
    detail = f"without {examples_seen(view, dropped)}"
    return predictions_from_examples_read(view, detail, counts_all=True)


def indication(view: View) -> Indication | None:
    """Looks for examples that no rank read."""
    if view.observed.examples_read is None:
        return None
    dropped = read_by_no_rank(view)
    return indication_if(
        bool(dropped),
        f"no rank read {examples_seen(view, dropped)} (of {view.setting.example_count})",
        "every example was read",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """The sampler or loader that drops examples, or the lines where too few are read."""
    drops = [
        place.pointed(f"leaves out {of_data.dropped_by(place)} examples", is_fault=True)
        for place in of_data.samplers(view)
        if of_data.dropped_by(place)
    ]
    drops += [
        place.pointed("leaves out a last batch that is not full", is_fault=True)
        for place in of_data.loaders(view)
        if of_data.last_batch_of(view, place)
    ]
    drops = lines_of_wrong_samplers(view) or drops
    drops = drops or of_data.line_that_drops(view, read_by_no_rank(view))
    drops = drops or of_data.lines_of_own_sampler(view)
    drops = lines_that_replace_rows(view) or drops or lines_that_leave_out(view)
    read = [
        place.pointed(of_data.what_was_read(view, place), is_fault=not drops)
        for place in of_data.reads(view)
    ]
    return with_reads(drops[:2], read[-1:])


def fix(view: View) -> str:
    """Read what was left out."""
    if lines_that_replace_rows(view):
        return "let every rank keep the rows that it was given."
    dropped, count = read_by_no_rank(view), view.setting.example_count
    return f"let a rank read {example_numbers(dropped, most=4)} too, and divide by {count}."


HYPOTHESIS = Hypothesis(
    name="examples_dropped",
    sentence="Some examples of the big batch were read by no rank.",
    look_at="drop_last, a sampler or a slice whose length is rounded down, or a filter on one rank",
    predict=predict,
    indication=indication,
    tell_apart="Use a multiple of the number of ranks as the number of examples: nothing is then "
    "dropped.",
    headline="no rank reads some examples",
    lines=lines,
    fix=fix,
)
