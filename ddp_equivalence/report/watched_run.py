"""The watched second run: what was seen while a step that differs ran once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.rows_read import NotKnown, examples_read
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.report.wrapping import plural, rank_names

if TYPE_CHECKING:
    from ddp_equivalence.measurement.calls import Call
    from ddp_equivalence.measurement.observation import Indices, Wrapper
    from ddp_equivalence.report.verdict import Verdict

SAME_LOSS = 1e-4
"""Losses that agree to four digits are called equal."""

MOST_NAMES = 4
MOST_LOSSES = 4
MOST_RANKS = 8
MOST_CALLS = 3


def watched_run_texts(verdict: Verdict) -> Iterator[str]:
    """What the second run read, its wrappers, losses and buffers; nothing if there was none."""
    if not verdict.observed:
        if verdict.why_not_watched:
            yield f"none, because {verdict.why_not_watched}; less is known about the cause"
        return
    if verdict.repeated is not None:
        yield "the same bits again" if verdict.repeated else "OTHER BITS than in the first run"
    yield _examples_read(verdict)
    yield from _wrappers(verdict)
    yield from _losses(verdict)
    yield from _clipped(verdict)
    yield from _stepped(verdict)
    yield from _buffers(verdict)


def _examples_read(verdict: Verdict) -> str:
    """Which examples the model was called with."""
    # A step of one's own that trains for several steps is called once, in step 0.
    with_backward = {call.step for seen in verdict.observed.values() for call in seen.backwards}
    steps = sorted(with_backward) or [0]
    known = []
    for step in steps:
        read = examples_read(verdict.observed, step, _dealt(verdict, step, steps == [0]))
        if read is NotKnown.EQUAL_ROWS:
            return (
                "the model was called with rows that several examples have in common, so it is "
                "not known which examples were read"
            )
        if isinstance(read, NotKnown):
            return "it could not be recognised which examples the model was called with"
        known.append(read)
    # By rank: the examples of every backward, of all steps.
    parts_by_rank = [
        [part for read in known for part in read.by_rank[rank]]
        for rank in range(len(verdict.observed))
    ]
    total = sum(verdict.examples)
    times_read = sum((read.times for read in known), Counter[int]())
    never = [index for index in range(total) if not times_read[index]]
    repeated = sorted(index for index, times in times_read.items() if times > 1)
    text = f"{len(times_read)} of {total} examples read"
    if repeated:
        text += f", {example_numbers(repeated)} more than once"
    if never:
        text += f", {example_numbers(never)} never"
    most_parts = max(map(len, parts_by_rank))
    if most_parts > len(verdict.examples):
        text += f", in {most_parts} micro-batches per rank"
    equal = set().union(*(read.equal for read in known))
    forwards = (one for seen in verdict.observed.values() for one in seen.forwards)
    if any(one.rows is not None and one.rows.declared for one in forwards):
        text += ", as the step says by rank.read"
    if equal:
        text += f" ({len(equal)} of them have equal rows and cannot be told apart)"
    return text


def _dealt(verdict: Verdict, step: int, of_all: bool) -> Mapping[int, Indices] | None:
    """The examples that each rank was given in a step, as positions in the batch of all steps.

    ``of_all``: those that it was given in all steps.
    """
    dealt: dict[int, Indices] = {}
    for rank, evidence in verdict.evidence.items():
        if evidence.examples is None:
            return None
        dealt[rank] = tuple(
            sum(verdict.examples[:number]) + index
            for number, indices in enumerate(evidence.examples)
            for index in indices
            if of_all or number == step
        )
    return dealt


def _wrappers(verdict: Verdict) -> Iterator[str]:
    wrappers_by_rank = [seen.wrappers for seen in verdict.observed.values()]
    if any(wrappers_by_rank):
        yield from map(_wrapper, wrappers_by_rank[0])
    elif not verdict.lane.drives_all_gpus and verdict.lane.name != "emulated":
        yield "no DistributedDataParallel"


def _wrapper(wrapper: Wrapper) -> str:
    passes, synchronised = len(wrapper.synchronised), sum(wrapper.synchronised)
    if not passes:
        return "a DistributedDataParallel that was never called"
    texts = [
        f"{passes} forward {plural(passes, 'pass', 'passes')}, "
        f"{synchronised} with synchronisation on"
    ]
    if wrapper.freed:
        texts.append("FREED before backward")
    if wrapper.buckets:
        texts.append(f"{len(wrapper.buckets)} {plural(len(wrapper.buckets), 'bucket')}")
    if wrapper.ignored:
        texts.append(f"told to ignore {', '.join(wrapper.ignored[:MOST_NAMES])}")
    if "comm_hook" in wrapper.logged:
        texts.append(f"communication hook {wrapper.logged['comm_hook']}")
    if wrapper.logged.get("find_unused_parameters"):
        texts.append("looks for unused parameters")
    if wrapper.logged.get("static_graph"):
        texts.append("static graph")
    return f"DistributedDataParallel: {', '.join(texts)}"


def _losses(verdict: Verdict) -> Iterator[str]:
    """The losses at which backward began, on every rank, beside the big batch's."""
    losses_by_rank = {
        rank: [backward.loss for backward in seen.backwards]
        for rank, seen in verdict.observed.items()
    }
    all_losses = [loss for losses in losses_by_rank.values() for loss in losses]
    if not all_losses or None in all_losses:
        return
    text_by_rank = {
        rank: " ".join(text_of(loss or 0.0, ".4g") for loss in losses[:MOST_LOSSES])
        + (" ..." if len(losses) > MOST_LOSSES else "")
        for rank, losses in losses_by_rank.items()
    }
    if len(set(text_by_rank.values())) == 1 and len(text_by_rank) > 1:
        text = f"backward began at a loss of {next(iter(text_by_rank.values()))} on every rank"
    else:
        shown = list(text_by_rank.items())[:MOST_RANKS]
        losses_text = "; ".join(f"rank {rank}: {losses}" for rank, losses in shown)
        text = f"backward began at these losses: {losses_text}"
    whole, mean = verdict.localisation.big_batch_loss, verdict.localisation.mean_rank_loss
    if whole is None or mean is None:
        yield text
    elif abs(whole - mean) <= SAME_LOSS * abs(whole):
        yield f"{text} (the mean over the ranks is the big batch's loss)"
    else:
        numbers = f"is {text_of(mean, '.4g')}, the big batch's loss is {text_of(whole, '.4g')}"
        yield f"{text} (the mean over the ranks {numbers})"


def _clipped(verdict: Verdict) -> Iterator[str]:
    """What the ranks clipped, and at which lines."""

    def text(call: Call) -> str:
        return f"{call.what or 'clipping'}{_to(call)}{_at(call)}"

    yield from _by_rank(verdict, "gradients were clipped", Kind.CLIP, text)


def _stepped(verdict: Verdict) -> Iterator[str]:
    """The optimizers that stepped, and at which lines."""

    def text(call: Call) -> str:
        return f"{call.what or 'an optimizer'}{_at(call)}"

    yield from _by_rank(verdict, "optimizer steps", Kind.OPTIMIZER_STEP, text)


def _by_rank(verdict: Verdict, what: str, kind: Kind, text: Callable[[Call], str]) -> Iterator[str]:
    """The calls of a kind: once if those of all ranks are the same, else of each rank."""
    texts = {
        rank: _counted([text(call) for call in seen.calls if call.kind is kind]) or "none"
        for rank, seen in sorted(verdict.observed.items())
    }
    if set(texts.values()) == {"none"}:
        return
    if len(set(texts.values())) == 1:
        yield f"{what}: {next(iter(texts.values()))}"
        return
    shown = list(texts.items())[:MOST_RANKS]
    yield f"{what}: {'; '.join(f'rank {rank}: {one}' for rank, one in shown)}"


def _to(call: Call) -> str:
    return "" if call.value is None else f" to {text_of(call.value, '.3g')}"


def _at(call: Call) -> str:
    line = call.users_line or call.line
    return "" if line is None else f" at {Path(line.file).name}:{line.number}"


def _counted(texts: list[str]) -> str:
    """The texts in order, each once, with how often it came; of many, the first ones."""
    counts = Counter(texts)
    shown = [
        text if times == 1 else f"{text} ({times} times)"
        for text, times in list(counts.items())[:MOST_CALLS]
    ]
    return ", ".join(shown) + (", ..." if len(counts) > MOST_CALLS else "")


def at_the_loss(verdict: Verdict, whole: float) -> str:
    """The ranks whose loss is the big batch's, ``whole``, or W times it, in words; "" if none.

    The losses of a rank's micro-batches are added up.
    """
    world_size = verdict.case.ranks.world_size
    losses = {
        rank: sum(backward.loss or 0.0 for backward in seen.backwards)
        for rank, seen in verdict.observed.items()
    }
    for factor in (1, world_size):
        near = [
            rank
            for rank, loss in losses.items()
            if abs(loss - factor * whole) <= SAME_LOSS * abs(loss)
        ]
        if near and world_size > 1:
            others = [rank for rank in losses if rank not in near]
            place = "at that loss" if factor == 1 else f"at {factor} times that loss"
            exception = f", but not on {rank_names(others)}" if others else ""
            return f"{place} on {rank_names(near)}{exception}"
    return ""


def _buffers(verdict: Verdict) -> Iterator[str]:
    """Which ranks hold the same buffers afterwards, if not all of them do."""
    ranks_by_buffers: dict[str, list[int]] = {}
    for rank, seen in verdict.observed.items():
        ranks_by_buffers.setdefault(seen.buffers, []).append(rank)
    if len(ranks_by_buffers) > 1:
        groups = "; ".join(rank_names(ranks) for ranks in ranks_by_buffers.values())
        yield f"afterwards, buffers differ between these groups: {groups}"
