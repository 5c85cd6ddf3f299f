"""The ranks train other weights, or read other examples, than they should."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from ddp_equivalence.diagnosis.causes.losses import mend_examples
from ddp_equivalence.diagnosis.examples_read import (
    all_ranks_read_the_same,
    example_numbers,
    examples_seen,
    passes_of_read_examples,
    predictions_from_examples_read,
    read_by_no_rank,
    read_by_several_ranks,
    read_equally_often,
    read_more_than_once,
    texts_of_rows,
)
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    indication_if,
    ranks_by_number,
)
from ddp_equivalence.diagnosis.lines import of_data
from ddp_equivalence.diagnosis.lines.of_data import lines_that_replace_rows, lines_that_share
from ddp_equivalence.diagnosis.lines.words import counted, first_of, last_of, names_text
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Contents, Kind

BY_READING = "Gradients alone cannot decide: compare the examples that the ranks read."

# The weights with which the ranks begin.


def _weights_differ(view: View) -> Indication | None:
    ranks_by_digest: dict[str, list[int]] = {}
    for rank, observation in view.observed.by_rank.items():
        if observation.forwards and observation.forwards[0].weights:
            ranks_by_digest.setdefault(observation.forwards[0].weights, []).append(rank)
    if not ranks_by_digest:
        return None
    groups = "; ".join(ranks_by_number(ranks) for ranks in ranks_by_digest.values())
    return indication_if(
        len(ranks_by_digest) > 1,
        f"before the first forward pass, weights differ between these groups: {groups}",
        "all ranks began the forward pass with the same weights",
        conclusive=True,
    )


def _lines_of_weights(view: View) -> Sequence[PointedLine]:
    """Where the weights came to differ, and a broadcast that has not made them equal."""
    calls, weights = view.observed.calls, (Contents.PARAMETERS, Contents.COPIES_OF_PARAMETERS)
    broadcasts = calls.collectives(lambda call, of: call.backwards == 0 and of.contents in weights)
    pointed = []
    for parted in _where_weights_part(view):
        note = f"changes {names_text(parted.names)}; the weights differ between ranks from here on"
        missing = "" if broadcasts else "a broadcast of all weights from rank 0"
        pointed.append(parted.pointed(note, is_fault=not broadcasts, missing=missing))
    for place in broadcasts[-1:]:
        groups = groups_text(place.groups) if len(place.groups) > 1 else "one group"
        note = f"{place.op} of {names_text(place.names)} in {groups}; weights differ after it"
        pointed.append(place.pointed(note, is_fault=True))
    seeds = calls.places(Kind.SEED, where=lambda call: call.backwards == 0)
    differ = [one for one in seeds if len({calls[-1].value for calls in one.by_rank.values()}) > 1]
    return [*last_of(differ, "seeds differ between ranks", is_fault=False), *pointed]


def _where_weights_part(view: View) -> list[CallSite]:
    """The line after which the weights differed between ranks until the forward pass, if any."""
    held = dict.fromkeys(view.observed.by_rank, "")  # the weights that the case gave to all ranks
    parted: list[CallSite] = []
    for place in view.observed.calls.places(Kind.WEIGHTS):
        held |= {rank: calls[-1].what for rank, calls in place.by_rank.items()}
        parted = (parted or [place]) if len(set(held.values())) > 1 else []
    return parted


# What the ranks read: each of these causes is told by it, and predicts what right code would make
# of just these examples.


def _seen(view: View, holds: bool, because: str, otherwise: str) -> Indication | None:
    """None if it is not known what was read."""
    known = view.observed.examples_read is not None
    return indication_if(holds, because, otherwise) if known else None


def _as_read(view: View, holds: bool, detail: str = "") -> Sequence[Prediction]:
    return predictions_from_examples_read(view, detail) if holds else ()


def _copies_of_one_shard(view: View) -> Sequence[Prediction]:
    """The gradient of what all ranks read; if that is unknown, of the shard of any one rank."""
    if view.observed.examples_read is not None:
        return predictions_from_examples_read(view) if all_ranks_read_the_same(view) else ()
    contributions = view.parts.contributions()
    if contributions is None or view.world_size == 1:
        return ()
    return tuple(
        Prediction(view.on_every_rank(contribution), f"the shard of rank {rank}")
        for rank, contribution in enumerate(contributions)
    )


def _same_read(view: View) -> Indication | None:
    because = f"every rank read {examples_seen(view, _read_by_rank_0(view))}"
    return _seen(view, all_ranks_read_the_same(view), because, "the ranks read different examples")


def _read_by_rank_0(view: View) -> list[int]:
    return sorted({index for part in (view.observed.examples_read or ((),))[0] for index in part})


def _lines_that_give_all_the_same(view: View) -> Sequence[PointedLine]:
    """The sampler or loader that gives all ranks the same, and where this is read."""
    pointed = of_data.lines_of_samplers(view)
    if not of_data.samplers(view):
        pointed = last_of(
            of_data.loaders(view), "no DistributedSampler: a DataLoader on every rank"
        )
    pointed = pointed or [
        place.pointed(f"{place.op} in {groups_text(place.groups)}", place.op in FROM_ONE_RANK)
        for place in of_data.data_collectives(view)
    ]
    numbers = example_numbers(_read_by_rank_0(view), most=4)
    note = f"all {view.world_size} ranks read {numbers}" if view.observed.examples_read else ""
    return of_data.lines_of_reading(view, pointed, note=note)


def _with_sampler(view: View) -> str:
    """What makes samplers and loaders give each rank its own part of one order; "" without any."""
    if of_data.samplers(view):
        return (
            f"give DistributedSampler num_replicas={view.world_size}, each rank's own rank, and "
            "the same seed on all ranks."
        )
    takes = [one for one in of_data.loaders(view) if of_data.number_of(one, "takes_sampler")]
    if not takes:
        return ""
    shuffles = " in place of shuffle=True" if of_data.number_of(takes[-1], "shuffle") else ""
    return f"give the DataLoader a DistributedSampler{shuffles}."


FROM_ONE_RANK = ("scatter", "broadcast")
"""Collectives that give all ranks what one of them has."""


def _mend_same_data(view: View) -> str:
    count = view.world_size
    given = [one.op for one in of_data.data_collectives(view) if one.op in FROM_ONE_RANK]
    if given and not of_data.samplers(view):
        return f"leave the {given[-1]} out: each rank has read rows of its own."
    rows = f"let rank r read only examples r, r + {count}, r + {2 * count}, and so on."
    return _with_sampler(view) or rows


Order = tuple[int, ...]


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


def _other_orders(view: View) -> Indication | None:
    if not ranks_shuffled_apart(view):
        return None
    repeated, unread = read_more_than_once(view), read_by_no_rank(view)
    return Indication(
        True,
        f"the ranks read slices of different orders: {examples_seen(view, repeated)} (of "
        f"{view.setting.example_count}) read more than once, {example_numbers(unread)} by no rank",
    )


def _lines_that_shuffle(view: View) -> Sequence[PointedLine]:
    """Where the order is made, if that was seen; else where the model gets its rows."""
    calls = view.observed.calls
    seeds = [place for place in calls.places(Kind.SEED, Kind.SHUFFLE) if _differs_by_rank(place)]
    shuffles = calls.places(Kind.SHUFFLE)
    if seeds:
        values = ", ".join(f"{seeds[-1].by_rank[rank][0].value:g}" for rank in seeds[-1].ranks[:6])
        seeded = seeds[-1].pointed(f"the seeds of the ranks: {values}", is_fault=True)
        return [seeded, *(place.pointed() for place in shuffles[:1] if place.line != seeded.line)]
    for place in shuffles[-1:]:
        return [place.pointed("each rank's order is another one", is_fault=True)]
    note = "the model reads other examples than its share"
    return lines_that_share(view) or first_of(calls.places(Kind.FORWARD), note)


def _differs_by_rank(place: CallSite) -> bool:
    """True if the ranks gave different seeds here."""
    values = {place.by_rank[rank][0].value for rank in place.ranks}
    return len(values) > 1 and None not in values


def _shares_overlap(view: View) -> bool:
    """True if several ranks read the same examples, and no other cause says why.

    Ranks that share a model read the same ones: all examples are then read equally often.
    """
    if all_ranks_read_the_same(view) or ranks_shuffled_apart(view) or _is_padding(view):
        return False
    if passes_of_read_examples(view) or lines_that_replace_rows(view):
        return False
    return bool(read_by_several_ranks(view)) and not read_equally_often(view)


def _who_reads_what(view: View) -> Indication | None:
    return Indication(True, "; ".join(texts_of_rows(view))) if _shares_overlap(view) else None


def _is_padding(view: View) -> bool:
    """True if examples were read again so that all ranks read equally many, and none is missing.

    A rank that goes twice over its own examples pads nothing, and neither do slices that overlap,
    nor groups of ranks that read the same examples.
    """
    if not read_more_than_once(view) or read_by_no_rank(view) or passes_of_read_examples(view):
        return False
    if _are_overlapping_slices(view) or read_equally_often(view):
        return False
    read = view.observed.examples_read or ()
    sizes = {sum(map(len, parts)) for parts in read}
    return len(sizes) == 1 or not read_by_several_ranks(view)


def _are_overlapping_slices(view: View) -> bool:
    """True if each rank read examples that follow each other, where there is nothing to pad.

    A sampler pads with the first examples, or with the last of a rank, until the ranks can read
    equally many. Examples that the ranks could share equally need no padding.
    """
    read = view.observed.examples_read
    if read is None or view.setting.example_count % view.world_size:
        return False
    by_rank = [sorted({one for part in parts for one in part}) for parts in read]
    follow = all(one and one[-1] - one[0] == len(one) - 1 for one in by_rank)
    return follow and bool(read_by_several_ranks(view))


def _padded(view: View) -> Sequence[Prediction]:
    other = all_ranks_read_the_same(view) or ranks_shuffled_apart(view)
    repeated = examples_seen(view, read_more_than_once(view))
    return _as_read(view, _is_padding(view) and not other, f"{repeated} read more than once")


def _read_again(view: View) -> Indication | None:
    repeated = read_more_than_once(view)
    seen = f"{examples_seen(view, repeated)} (of {view.setting.example_count}) read more than once"
    otherwise = (
        "examples were read again, and not to pad" if repeated else "no example was read twice"
    )
    return _seen(view, _is_padding(view), seen, otherwise)


def _without_dropped(view: View) -> Sequence[Prediction]:
    """The gradient of the examples read, if some were not read and none was read twice, or if a
    collective gave ranks the rows of others.
    """
    dropped = read_by_no_rank(view)
    holds = not read_more_than_once(view) or bool(lines_that_replace_rows(view))
    return _as_read(view, bool(dropped) and holds, f"without {examples_seen(view, dropped)}")


def _not_read(view: View) -> Indication | None:
    dropped = read_by_no_rank(view)
    because = f"no rank read {examples_seen(view, dropped)} (of {view.setting.example_count})"
    return _seen(view, bool(dropped), because, "every example was read")


def _then(view: View) -> str:
    """The rest of a mend: what divides rightly when every example counts once."""
    divided = mend_examples(view)
    return f", and {divided}" if divided else "."


CAUSES = (
    Hypothesis(
        name="weights_differ_between_ranks",
        sentence="The ranks did not begin the forward pass with the same weights, so that "
        "gradients of different models were averaged.",
        look_at="the broadcast of the initial weights (DistributedDataParallel does it; code that "
        "averages by hand must do it too), and seeds that depend on the rank",
        headline="ranks begin with different weights",
        tell_apart="Gradients alone cannot decide: compare the weights before the forward pass.",
        indication=_weights_differ,
        lines=_lines_of_weights,
        mend=lambda view: (
            f"broadcast all {counted(len(view.parameters.names), 'parameter')} from rank 0 before "
            "the first forward pass."
        ),
        invalidates_gradients=True,
    ),
    Hypothesis(
        name="every_rank_same_data",
        sentence="All ranks read the same examples, so that the average is over copies of one "
        "shard.",
        look_at="a DistributedSampler: it is missing, or every rank passes it the same rank",
        headline="every rank reads the same examples",
        tell_apart=BY_READING,
        held=_copies_of_one_shard,
        indication=_same_read,
        lines=_lines_that_give_all_the_same,
        mend=_mend_same_data,
        of_rows=True,
    ),
    Hypothesis(
        name="ranks_shuffle_apart",
        sentence="Each rank took its slice of an order of its own: some examples were read by "
        "several ranks, and others by none.",
        look_at="the seed of the sampler or of the permutation, which must be the same on all "
        "ranks, and may change only with the epoch",
        headline="each rank shuffles in its own order",
        tell_apart="Do not shuffle: this difference then goes away.",
        held=lambda view: _as_read(view, ranks_shuffled_apart(view)),
        indication=_other_orders,
        lines=_lines_that_shuffle,
        mend=lambda view: (
            _with_sampler(view)
            or "shuffle with the same seed on every rank, and take the rank's slice of that one "
            "order."
        ),
        of_rows=True,
    ),
    Hypothesis(
        name="shares_overlap",
        sentence="Several ranks read the same examples, which then count more than once.",
        look_at="the line that takes a rank's share of the examples: a slice, a stride or a "
        "condition on the rank, which must give every example to one rank",
        headline="several ranks read the same examples",
        tell_apart=BY_READING,
        held=lambda view: _as_read(view, _shares_overlap(view), "; ".join(texts_of_rows(view))),
        indication=_who_reads_what,
        lines=lambda view: of_data.lines_of_reading(
            view, ranks=next(iter(read_by_several_ranks(view)), ())
        ),
        mend="let exactly one rank read each of the {examples} examples.",
        of_rows=True,
    ),
    Hypothesis(
        name="sampler_padding_counted",
        sentence="Some examples were read more than once and counted each time. A sampler does "
        "this to pad all shards to the same length.",
        look_at="DistributedSampler(drop_last=False) where the number of examples is not a "
        "multiple of the number of ranks: give the repeated examples no weight, or use uneven "
        "shards with a global mean",
        headline="some examples are counted twice",
        tell_apart="Use a multiple of the number of ranks as the number of examples: no padding is "
        "then needed.",
        held=_padded,
        indication=_read_again,
        lines=of_data.lines_of_reading,
        mend=lambda view: f"count every example once: give repetitions no weight{_then(view)}",
        of_rows=True,
    ),
    Hypothesis(
        name="examples_dropped",
        sentence="Some examples of the big batch were read by no rank.",
        look_at="drop_last, a sampler or a slice whose length is rounded down, or a filter on one "
        "rank",
        headline="no rank reads some examples",
        tell_apart="Use a multiple of the number of ranks as the number of examples: nothing is "
        "then dropped.",
        held=_without_dropped,
        indication=_not_read,
        lines=lambda view: of_data.lines_of_reading(view, lines_that_replace_rows(view)),
        mend=lambda view: f"let a rank read them too{_then(view)}",
        of_rows=True,
    ),
)
