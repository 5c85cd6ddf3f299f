"""All ranks read the same examples."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.examples_read import (
    all_ranks_read_the_same,
    example_numbers,
    examples_seen,
    predictions_from_examples_read,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, indication_if
from ddp_equivalence.diagnosis.lines import of_data
from ddp_equivalence.diagnosis.lines.of_data import lines_that_share, with_reads
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
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


def indication(view: View) -> Indication | None:
    """Compares the examples that each rank read."""
    if view.observed.examples_read is None:
        return None
    read_by_rank_0 = sorted({i for part in view.observed.examples_read[0] for i in part})
    return indication_if(
        all_ranks_read_the_same(view),
        f"every rank read {examples_seen(view, read_by_rank_0)}",
        "the ranks read different examples",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """The sampler or loader that gives all ranks the same, and where this is read."""
    pointed = [
        place.pointed(f"{place.first.what} on every rank", is_fault=True)
        for place in _samplers_of_one_rank(view)
    ]
    if not pointed and not of_data.samplers(view):
        pointed = [
            place.pointed(f"no DistributedSampler: {place.first.what} on every rank", is_fault=True)
            for place in of_data.loaders(view)
            if len(place.ranks) == view.world_size
        ]
    if not pointed:
        pointed = [
            place.pointed(f"{place.first.collective.op} in {groups_text(place.groups)}")
            for place in of_data.data_collectives(view)
            if place.first.collective is not None
        ]
    if not pointed:
        pointed = lines_that_share(view)
    note, known = _read_by_all(view), any(one.is_fault for one in pointed)
    read = [place.pointed(note, is_fault=not known) for place in of_data.reads(view)[:1]]
    return with_reads(pointed[-2:], read)


def _samplers_of_one_rank(view: View) -> list[CallSite]:
    """The lines that made samplers which give all ranks the same examples."""
    return [
        place
        for place in of_data.samplers(view)
        if len({calls[-1].what for calls in place.by_rank.values()}) == 1
        and len(place.ranks) == view.world_size
    ]


def _read_by_all(view: View) -> str:
    read = (view.observed.examples_read or ((),))[0]
    numbers = example_numbers(sorted({index for part in read for index in part}), most=4)
    return f"all {view.world_size} ranks read {numbers}" if read else ""


def fix(view: View) -> str:
    """Divide the examples among the ranks."""
    size = view.world_size
    if _samplers_of_one_rank(view):
        return f"give DistributedSampler num_replicas={size} and the number of its own rank."
    if of_data.loaders(view) and not of_data.samplers(view):
        return f"give the DataLoader a DistributedSampler with num_replicas={size} and its rank."
    count = view.setting.example_count
    return f"let each of the {size} ranks read other ones of the {count} examples."


HYPOTHESIS = Hypothesis(
    name="every_rank_same_data",
    sentence="All ranks read the same examples, so that the average is over copies of one shard.",
    look_at="a DistributedSampler: it is missing, or every rank passes it the same rank",
    predict=predict,
    indication=indication,
    tell_apart="Gradients alone cannot decide: compare the examples that the ranks read.",
    headline="every rank reads the same examples",
    lines=lines,
    fix=fix,
)
