"""Every rank takes its slice of an order of its own, so that the slices overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from ddp_equivalence.diagnosis.examples_read import (
    example_numbers,
    examples_seen,
    predictions_from_examples_read,
    read_by_no_rank,
    read_more_than_once,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_data import lines_that_share
from ddp_equivalence.diagnosis.lines.source_tree import run_lines
from ddp_equivalence.diagnosis.lines.sources import Sources
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

Order = tuple[int, ...]


def predict(view: View) -> Sequence[Prediction]:
    """The gradient of what was read, where the ranks' slices come from orders of their own."""
    if not ranks_shuffled_apart(view):
        return ()
    repeated, unread = len(read_more_than_once(view)), len(read_by_no_rank(view))
    return predictions_from_examples_read(
        view, f"{repeated} examples read more than once, and {unread} by no rank"
    )


def ranks_shuffled_apart(view: View) -> bool:
    """True if the ranks read slices of the right size that overlap as those of one order cannot.

    No rank reads an example twice, and all ranks together read as many as there are.
    """
    read = view.observed.examples_read
    if read is None or view.world_size == 1:
        return False
    orders = [tuple(index for part in parts for index in part) for parts in read]
    lengths = [len(order) for order in orders]
    as_many = abs(sum(lengths) - view.setting.example_count) < view.world_size
    if not as_many or max(lengths) - min(lengths) > 1:
        return False
    if any(len(set(order)) < len(order) for order in orders) or all(map(_is_regular, orders)):
        return False
    return any(_overlap_inside(one, other) for one, other in combinations(orders, 2))


def _is_regular(order: Order) -> bool:
    """True for examples at equal distances, as a slice of an order that is not shuffled has."""
    return len({after - before for before, after in pairwise(order)}) <= 1


def _overlap_inside(one: Order, other: Order) -> bool:
    """True if the two share examples, and are not neighbouring slices of one order."""
    shared = set(one) & set(other)
    size = len(shared)
    neighbours = one[len(one) - size :] == other[:size] or other[len(other) - size :] == one[:size]
    return bool(shared) and not neighbours


def indication(view: View) -> Indication | None:
    """Compares the examples that the ranks read, and their order."""
    if not ranks_shuffled_apart(view):
        return None
    repeated, unread = read_more_than_once(view), read_by_no_rank(view)
    return Indication(
        True,
        f"the ranks read slices of different orders: {examples_seen(view, repeated)} (of "
        f"{view.setting.example_count}) read more than once, {example_numbers(unread)} by no rank",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where the order is made, if that was seen; else where the model gets its rows."""
    calls = view.observed.calls
    seeds = [place for place in calls.places(Kind.SEED, Kind.SHUFFLE) if _differs_by_rank(place)]
    shuffles = calls.places(Kind.SHUFFLE)
    if seeds:
        values = ", ".join(f"{seeds[-1].by_rank[rank][0].value:g}" for rank in seeds[-1].ranks[:6])
        seeded = seeds[-1].pointed(f"the seeds of the ranks: {values}", is_fault=True)
        return [seeded, *(place.pointed() for place in shuffles[:1] if place.line != seeded.line)]
    note = "each rank's order is another one"
    for place in shuffles[-1:]:
        run = run_lines(view, place.ranks[0])
        of_rank = Sources(run).lines_of_rank(place.line)[:1]
        seeding = [PointedLine(one, "is made with the rank", True) for one in of_rank]
        return [*seeding, place.pointed(note, is_fault=True)]
    return lines_that_share(view) or [
        place.pointed("the model reads other examples than its share", is_fault=True)
        for place in calls.places(Kind.FORWARD)[:1]
    ]


def _differs_by_rank(place: CallSite) -> bool:
    """True if the ranks gave different seeds here."""
    values = {place.by_rank[rank][0].value for rank in place.ranks}
    return len(values) > 1 and None not in values


def fix(view: View) -> str:
    """One seed for all ranks."""
    return "shuffle with the same seed on every rank, and take the rank's slice of that one order."


HYPOTHESIS = Hypothesis(
    name="ranks_shuffle_apart",
    sentence="Each rank took its slice of an order of its own: some examples were read by several "
    "ranks, and others by none.",
    look_at="the seed of the sampler or of the permutation, which must be the same on all ranks, "
    "and may change only with the epoch",
    predict=predict,
    indication=indication,
    tell_apart="Do not shuffle: this difference then goes away.",
    headline="each rank shuffles in its own order",
    lines=lines,
    fix=fix,
)
