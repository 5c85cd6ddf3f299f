"""The evidence: what really ran, what was seen in the second run, which edits were tried, and how
to repeat it.
"""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddp_equivalence.case.shards import OWN
from ddp_equivalence.comparison.comparison import Form
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.rows_read import NotKnown, examples_read
from ddp_equivalence.diagnosis.state import text_of_buffers
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.report.machine import gpu_texts, tf32_texts
from ddp_equivalence.report.text import Line, Style, labelled, plural, rank_names

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.measurement.calls import Call
    from ddp_equivalence.measurement.observation import Indices, Wrapper
    from ddp_equivalence.report.verdict import Verdict


# The edits of the step that were tried, for a full report.


def trial_lines(verdict: Verdict) -> list[Line]:
    """Each edit that repairs the step, and how many were tried; nothing if none was."""
    repairs = verdict.repairs
    if repairs.why_not:
        return labelled("Tried: ", f"no edits of the step, because: {repairs.why_not}")
    if not repairs.tried:
        return []
    noun = plural(repairs.of, "small edit", "small edits")
    of = "" if repairs.tried == repairs.of else f" of {repairs.of}"
    count = f"{repairs.tried}{of} {noun} of the lines that the step runs"
    if not repairs.found:
        return labelled("Tried: ", f"{count}; none of them was seen to repair it.")
    repair = plural(repairs.right, "of them repairs it", "of them repair it, such as")
    lines = labelled("Tried: ", f"{count}; {repairs.right} {repair}:")
    for one in repairs.found:
        place = f"{os.path.basename(one.line.file)}:{one.line.number}"
        lines += labelled(f"  {place}: ", one.text)
    return lines


# Gradients that have the values of the big batch in another form, and what follows from that.

MOST_NAMES = 4


def other_form_texts(comparison: Comparison) -> Iterator[str]:
    """One clause for all parameters that have the same two forms, on the same ranks."""
    alike: dict[tuple[Form, Form, tuple[int, ...]], list[str]] = {}
    for one in comparison.other_forms:
        alike.setdefault((one.in_big_batch, one.on_ranks, one.ranks), []).append(one.name)
    for (in_big_batch, on_ranks, ranks), names in alike.items():
        everywhere = len(ranks) == len(comparison.ranks)
        yield _text(names, in_big_batch, on_ranks, "" if everywhere else rank_names(ranks))


def _text(names: list[str], in_big_batch: Form, on_ranks: Form, where: str) -> str:
    """``where``: the ranks, if they are not all of them."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    which = ", ".join(names[:MOST_NAMES]) + more
    has, it = plural(len(names), "has", "have"), plural(len(names), "it", "them")
    decay = "an optimizer with weight decay or momentum would"
    if on_ranks is Form.ZEROS:
        return (
            f"{which} {has} no gradient in the big batch and zeros on all ranks: {decay} move {it}"
        )
    if on_ranks is Form.ABSENT:
        return (
            f"{which} {has} {in_big_batch.value} in the big batch and none on any rank: "
            f"{decay} not move {it}"
        )
    return (
        f"{which} {plural(len(names), 'is', 'are')} {in_big_batch.value} in the big batch and "
        f"{on_ranks.value} on {where or 'all ranks'}"
    )


# The evidence: what really ran, and how to repeat it.


def evidence_lines(verdict: Verdict) -> list[Line]:
    """What ran, where it ran, the case, and how to repeat it."""
    lines = labelled("Evidence: ", "; ".join(_evidence(verdict)))
    watched = "; ".join(watched_run_texts(verdict))
    if watched:
        lines += labelled("Watched second run: ", watched)
    if verdict.planted:
        lines += labelled("Planted:  ", f"{verdict.planted}, on purpose")
    if not verdict.of_script:
        lines += labelled("Case:     ", str(verdict.case))
    if verdict.outcome == "different":
        lines += _how_to_export(verdict)
    if verdict.repeat:  # on one line, however long, so that it can be pasted
        lines.append(Line(f"  Repeat:   {verdict.repeat}", Style.LABEL, styled=len("  Repeat:")))
    return lines


def _how_to_export(verdict: Verdict) -> list[Line]:
    if verdict.of_script:
        files = "--export DIR writes the first step that differs as files that stand alone"
        return labelled("Files:    ", files)
    if not _can_be_a_script(verdict):
        return []
    options = "--export-repro DIR (in pytest: --ddp-export-repro DIR)"
    return labelled("Script:   ", f"{options} writes this check as one plain torch script")


def _can_be_a_script(verdict: Verdict) -> bool:
    """True unless ``export`` would refuse the model or how it is trained."""
    if not verdict.training.is_plain_sgd or verdict.why_not_float64:
        return False
    buffers = () if verdict.analysis is None else verdict.analysis.reference.buffers.values()
    return not any(buffer.is_complex() for buffer in buffers)


def _evidence(verdict: Verdict) -> Iterator[str]:
    comparison = verdict.comparison
    if verdict.evidence:
        count = len(verdict.evidence)
        yield f"{count} {plural(count, 'rank')} reported"
        yield from _examples_given(verdict)
        yield from _collectives(verdict)
        replicas = verdict.evidence[0].notes.get("replicas") if 0 in verdict.evidence else None
        if replicas:
            yield f"{replicas} replicas ran{' on rank 0' if count > 1 else ''}"
    if comparison is not None and comparison.parameters:
        ranks = len(comparison.ranks)
        yield (
            f"{len(comparison.parameters)} parameters ({comparison.elements} elements) compared "
            f"on {ranks} {plural(ranks, 'rank')}"
        )
        rounding = [
            parameter.name
            for parameter in comparison.parameters
            if parameter.limit.only_rounding and parameter.norm
        ]
        if rounding:
            names = ", ".join(rounding[:MOST_NAMES])
            yield f"{names} {plural(len(rounding), 'holds', 'hold')} nothing but rounding"
    buffers = verdict.differing_buffers
    if buffers:
        names = ", ".join(buffers[:MOST_NAMES])
        more = f" and {len(buffers) - MOST_NAMES} more" if len(buffers) > MOST_NAMES else ""
        yield f"at the end the ranks hold different buffers: {names}{more}"
    beside = verdict.buffers_beside_big_batch
    if beside:
        more = f" and {len(beside) - MOST_NAMES} more" if len(beside) > MOST_NAMES else ""
        yield (
            "buffers are not those that the big batch leaves, which is no difference of gradients: "
            f"{text_of_buffers(beside[:MOST_NAMES])}{more}"
        )
    if comparison is not None and verdict.compare == "gradients":
        yield from other_form_texts(comparison)
    yield from _clipping(verdict)
    yield _place(verdict)


def _clipping(verdict: Verdict) -> Iterator[str]:
    """What the step clips, and what that means for what is compared."""
    clip = verdict.training.clip
    if clip is not None:
        limit = f" to {clip:g}" if isinstance(clip, (int, float)) else ""
        yield f"the gradients of the big batch are clipped{limit} as well"
    calls = dict.fromkeys(call for one in verdict.evidence.values() for call in one.clips)
    if calls and verdict.compare == "gradients":
        yield f"gradients are compared as they were before the step clipped {next(iter(calls))}"


def _place(verdict: Verdict) -> str:
    """Lane, version of torch, devices, and the precision of float32 on CUDA."""
    lane = verdict.lane
    devices = sorted({one.device for one in verdict.evidence.values()}) or [lane.device_type]
    gpus = gpu_texts({rank: one.gpu for rank, one in verdict.evidence.items()})
    where = f"{lane.name} ({lane.reason})" if lane.reason else lane.name
    place = f"{where}, torch {torch.__version__}, {', '.join(gpus or devices)}"
    return "; ".join([place, *tf32_texts({one.tf32 for one in verdict.evidence.values()})])


def _examples_given(verdict: Verdict) -> Iterator[str]:
    """How many examples were given to exactly one rank, once all ranks have reported."""
    if verdict.case.shards == OWN:
        who = "script" if verdict.of_script else "step"
        yield f"the {who} chooses its examples itself"
    elif len(verdict.evidence) == verdict.case.ranks.world_size:
        times_given = Counter(
            (step, index)
            for rank_evidence in verdict.evidence.values()
            for step, indices in enumerate(rank_evidence.examples or ())
            for index in indices
        )
        once = sum(times == 1 for times in times_given.values())
        yield f"{once} of {sum(verdict.examples)} examples given to one rank each"


def _collectives(verdict: Verdict) -> Iterator[str]:
    """What rank 0 issued, by collective and group; nothing without torch's flight recorder."""
    collectives = next(iter(verdict.evidence.values())).collectives
    if collectives is None:
        return
    forgotten = sum(one.elements for one in collectives if one.op == FORGOTTEN)
    counts: Counter[tuple[str, bool]] = Counter()
    elements: Counter[tuple[str, bool]] = Counter()
    for collective in collectives:
        if collective.op != FORGOTTEN:
            counts[collective.op, bool(collective.group)] += 1
            elements[collective.op, bool(collective.group)] += collective.elements
    if not counts:
        yield "no collective ran"
        return
    texts = [
        f"{count} {op} of {elements[op, subgroup]} {plural(elements[op, subgroup], 'element')}"
        f"{' outside the default group' if subgroup else ''}"
        for (op, subgroup), count in counts.items()
    ]
    earlier = ""
    if forgotten:
        earlier = f" (and {forgotten} earlier ones that the recorder no longer holds)"
    yield f"rank 0 issued {', '.join(texts)}{earlier}"


# The watched second run: what was seen while a step that differs ran once more.

SAME_LOSS = 1e-4
"""Losses that agree to four digits are called equal."""

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
