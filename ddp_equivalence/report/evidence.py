"""The evidence: what really ran, what was seen in the second run, and how to repeat it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ddp_equivalence.case.shards import OWN
from ddp_equivalence.comparison.comparison import Form
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.state import text_of_buffers
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.report.blocks import place_name
from ddp_equivalence.report.machine import gpu_texts, tf32_texts
from ddp_equivalence.report.text import Line, Style, labelled, listed, plural, rank_names, ranks_by

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.measurement.calls import Call
    from ddp_equivalence.measurement.observation import Wrapper
    from ddp_equivalence.report.verdict import Verdict

MOST_NAMES = 4


def evidence_lines(verdict: Verdict) -> list[Line]:
    """The lines on what ran, where it ran, the case, and how to repeat it."""
    lines = [
        *labelled("Evidence: ", "; ".join(_evidence(verdict))),
        *labelled("Watched second run: ", "; ".join(_watched_run(verdict))),
        *labelled("Case:     ", "" if verdict.asked.of_script else str(verdict.case)),
    ]
    if verdict.outcome == "different" and verdict.asked.of_script:
        files = "--export DIR writes the first step that differs as files that stand alone"
        lines += labelled("Files:    ", files)
    elif verdict.outcome == "different" and _can_be_a_script(verdict):
        options = "--export-repro DIR (in pytest: --ddp-export-repro DIR)"
        lines += labelled("Script:   ", f"{options} writes this check as one plain torch script")
    if verdict.repeat and verdict.outcome != "different":  # the screen says it of a difference
        lines.append(Line(f"  Repeat:   {verdict.repeat}", Style.LABEL, styled=len("  Repeat:")))
    return lines


def _can_be_a_script(verdict: Verdict) -> bool:
    """True unless ``export`` would refuse the model or how it is trained."""
    if not verdict.asked.training.is_plain_sgd or verdict.why_not_float64:
        return False
    buffers = () if verdict.analysis is None else verdict.analysis.reference.buffers.values()
    return not any(buffer.is_complex() for buffer in buffers)


# What really ran, in every check.


BY_THE_RANKS = ", each by itself, with what the CPU computed for the big batch"


def _evidence(verdict: Verdict) -> Iterator[str]:
    comparison, count = verdict.comparison, len(verdict.evidence)
    if count:
        yield f"{count} {plural(count, 'rank')} reported"
        yield from _examples_given(verdict)
        yield from _collectives(verdict)
        replicas = verdict.evidence[0].notes.get("replicas") if 0 in verdict.evidence else None
        if replicas:
            yield f"{replicas} replicas ran{' on rank 0' if count > 1 else ''}"
    if comparison is not None and comparison.parameters:
        ranks, parameters = len(comparison.ranks), comparison.parameters
        yield (
            f"{len(parameters)} parameters ({comparison.elements} elements) compared on {ranks} "
            f"{plural(ranks, 'rank')}{BY_THE_RANKS if comparison.by_the_ranks else ''}"
        )
        if verdict.analysis is not None and verdict.analysis.micro_batches > 1:
            yield (
                f"the big batch was computed in {verdict.analysis.micro_batches} micro-batches, "
                "because its forward pass did not fit into memory (their losses add up to that of "
                "the whole batch)"
            )
        rounding = [one.name for one in parameters if one.limit.only_rounding and one.norm]
        if rounding:
            names = listed(rounding, MOST_NAMES)
            yield f"{names} {plural(len(rounding), 'holds', 'hold')} nothing but rounding"
    if buffers := verdict.differing_buffers:
        yield f"at the end the ranks hold different buffers: {listed(buffers, MOST_NAMES)}"
    if beside := verdict.buffers_beside_big_batch:
        more = f" and {len(beside) - MOST_NAMES} more" if len(beside) > MOST_NAMES else ""
        yield (
            "buffers are not those that the big batch leaves, which is no difference of gradients: "
            f"{text_of_buffers(beside[:MOST_NAMES])}{more}"
        )
    if comparison is not None and verdict.asked.compare == "gradients":
        yield from _other_forms(comparison)
    clip = verdict.asked.training.clip
    if clip is not None:
        limit = f" to {clip:g}" if isinstance(clip, (int, float)) else ""
        yield f"the gradients of the big batch are clipped{limit} as well"
    calls = dict.fromkeys(call for one in verdict.evidence.values() for call in one.clips)
    if calls and verdict.asked.compare == "gradients":
        yield f"gradients are compared as they were before the step clipped {next(iter(calls))}"
    yield _place(verdict)


def _other_forms(comparison: Comparison) -> Iterator[str]:
    """Gradients that have the values of the big batch in another form, and what follows from that:
    one clause for all parameters that have the same two forms, on the same ranks.
    """
    alike: dict[tuple[Form, Form, tuple[int, ...]], list[str]] = {}
    for one in comparison.other_forms:
        alike.setdefault((one.in_big_batch, one.on_ranks, one.ranks), []).append(one.name)
    for (in_big_batch, on_ranks, ranks), names in alike.items():
        which = listed(names, MOST_NAMES)
        has, it = plural(len(names), "has", "have"), plural(len(names), "it", "them")
        decay = "an optimizer with weight decay or momentum would"
        if on_ranks is Form.ZEROS:
            there, then = "no gradient in the big batch and zeros on all ranks", f"move {it}"
        else:
            there = f"{in_big_batch.value} in the big batch and none on any rank"
            then = f"not move {it}"
        if on_ranks in (Form.ZEROS, Form.ABSENT):
            yield f"{which} {has} {there}: {decay} {then}"
            continue
        everywhere = len(ranks) == len(comparison.ranks)
        yield (
            f"{which} {plural(len(names), 'is', 'are')} {in_big_batch.value} in the big batch and "
            f"{on_ranks.value} on {'all ranks' if everywhere else rank_names(ranks)}"
        )


def _place(verdict: Verdict) -> str:
    """Lane, version of torch, devices, and the precision of float32 on CUDA."""
    lane, evidence = verdict.lane, verdict.evidence
    devices = sorted({one.device for one in evidence.values()}) or [lane.device_type]
    gpus = gpu_texts({rank: one.gpu for rank, one in evidence.items()})
    where = f"{lane.name} ({lane.reason})" if lane.reason else lane.name
    place = f"{where}, torch {torch.__version__}, {', '.join(gpus or devices)}"
    return "; ".join([place, *tf32_texts({one.tf32 for one in evidence.values()})])


def _examples_given(verdict: Verdict) -> Iterator[str]:
    """How many examples were given to exactly one rank, once all ranks have reported."""
    if verdict.case.shards == OWN:
        yield f"the {'script' if verdict.asked.of_script else 'step'} chooses its examples itself"
    elif len(verdict.evidence) == verdict.case.ranks.world_size:
        times_given = Counter(
            (step, index)
            for one in verdict.evidence.values()
            for step, indices in enumerate(one.examples or ())
            for index in indices
        )
        once = sum(times == 1 for times in times_given.values())
        yield f"{once} of {sum(verdict.examples)} examples given to one rank each"


def _collectives(verdict: Verdict) -> Iterator[str]:
    """The collectives of rank 0, by kind and group; nothing without torch's flight recorder."""
    collectives = next(iter(verdict.evidence.values())).collectives
    if collectives is None:
        return
    forgotten = sum(one.elements for one in collectives if one.op == FORGOTTEN)
    elements: dict[tuple[str, bool], list[int]] = {}
    for one in collectives:
        if one.op != FORGOTTEN:
            elements.setdefault((one.op, bool(one.group)), []).append(one.elements)
    if not elements:
        yield "no collective ran"
        return
    texts = [
        f"{len(sizes)} {op} of {sum(sizes)} {plural(sum(sizes), 'element')}"
        f"{' outside the default group' if subgroup else ''}"
        for (op, subgroup), sizes in elements.items()
    ]
    earlier = f" (and {forgotten} earlier ones that the recorder no longer holds)"
    yield f"rank 0 issued {', '.join(texts)}{earlier if forgotten else ''}"


# What was seen while a step that differs ran once more.

MOST_RANKS = 8
MOST_CALLS = 3


def _watched_run(verdict: Verdict) -> Iterator[str]:
    """The examples that the second run read, its wrappers and buffers; nothing without one."""
    observed = verdict.observed
    if not observed:
        if verdict.why_not_watched:
            yield f"none, because {verdict.why_not_watched}; less is known about the cause"
        return
    if verdict.repeated is not None:
        yield "the same bits again" if verdict.repeated else "OTHER BITS than in the first run"
    yield from _examples_read(verdict)
    wrappers_by_rank = [seen.wrappers for seen in observed.values()]
    if any(wrappers_by_rank):
        yield from map(_wrapper, wrappers_by_rank[0])
    elif not verdict.lane.drives_all_gpus and verdict.lane.name != "emulated":
        yield "no DistributedDataParallel"
    yield from _calls(verdict, "gradients were clipped", Kind.CLIP, "clipping")
    yield from _calls(verdict, "optimizer steps", Kind.OPTIMIZER_STEP, "an optimizer")
    groups = ranks_by((rank, seen.buffers) for rank, seen in observed.items()).values()
    if len(groups) > 1:
        names = "; ".join(map(rank_names, groups))
        yield f"afterwards, buffers differ between these groups: {names}"


def _examples_read(verdict: Verdict) -> Iterator[str]:
    """Which examples the model was called with, in the step that differs."""
    view = verdict.view
    if view is None:
        return
    if view.observed.examples_read is None:
        yield "it could not be recognised which examples the model was called with"
        return
    times, total = view.observed.times_read, view.setting.example_count
    never = [index for index in range(total) if not times[index]]
    repeated = [index for index in range(total) if times[index] > 1]
    parts = max(map(len, view.observed.examples_read))
    equal = view.observed.equal_where_read
    yield "".join(
        (
            f"{total - len(never)} of {total} examples read",
            f", {example_numbers(repeated)} more than once" if repeated else "",
            f", {example_numbers(never)} never" if never else "",
            f", in {parts} micro-batches per rank" if parts > 1 else "",
            f" ({len(equal)} of them have equal rows and cannot be told apart)" if equal else "",
        )
    )


def _wrapper(wrapper: Wrapper) -> str:
    passes, buckets, logged = len(wrapper.synchronised), len(wrapper.buckets), wrapper.logged
    if not passes:
        return "a DistributedDataParallel that was never called"
    texts = [
        f"{passes} forward {plural(passes, 'pass', 'passes')}",
        f"{sum(wrapper.synchronised)} with synchronisation on",
        "FREED before backward" if wrapper.freed else "",
        f"{buckets} {plural(buckets, 'bucket')}" if buckets else "",
        f"told to ignore {', '.join(wrapper.ignored[:MOST_NAMES])}" if wrapper.ignored else "",
        f"communication hook {logged['comm_hook']}" if "comm_hook" in logged else "",
        "looks for unused parameters" if logged.get("find_unused_parameters") else "",
        "static graph" if logged.get("static_graph") else "",
    ]
    return f"DistributedDataParallel: {', '.join(filter(None, texts))}"


def _calls(verdict: Verdict, what: str, kind: Kind, otherwise: str) -> Iterator[str]:
    """The calls of a kind and their lines: once if those of all ranks are the same, else of each.

    ``otherwise``: the name of a call without one.
    """

    def text(call: Call) -> str:
        limit = call.value if kind is Kind.CLIP else None
        to = "" if limit is None else f" to {text_of(limit, '.3g')}"
        line = call.users_line or call.line
        at = "" if line is None else f" at {place_name(line)}"
        return f"{call.what or otherwise}{to}{at}"

    def texts_of(calls: list[Call]) -> str:
        times = Counter(text(call) for call in calls if call.kind is kind)
        texts = [one if count == 1 else f"{one} ({count} times)" for one, count in times.items()]
        return listed(texts, MOST_CALLS) or "none"

    texts = {rank: texts_of(list(seen.calls)) for rank, seen in sorted(verdict.observed.items())}
    if set(texts.values()) != {"none"}:
        by_rank = [f"rank {rank}: {one}" for rank, one in texts.items()][:MOST_RANKS]
        alike = len(set(texts.values())) == 1
        yield f"{what}: {texts.popitem()[1] if alike else '; '.join(by_rank)}"
