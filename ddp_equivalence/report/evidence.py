"""The evidence: what really ran, as a report tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ddp_equivalence.case.shards import OWN
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.report.wrapping import of_ranks, plural, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.measurement.observation import Wrapper
    from ddp_equivalence.report.verdict import Verdict


SAME_LOSS = 1e-4
"""Losses that agree to four digits are printed alike."""


def evidence_lines(verdict: Verdict) -> list[str]:
    """What ran, where, the case, and how to repeat it."""
    comparison = verdict.comparison
    parts = []
    if verdict.evidence:
        count = len(verdict.evidence)
        parts.append(f"{count} {plural(count, 'rank')} reported")
        parts.append(_ledger(verdict))
        parts.append(_collectives(verdict))
        replicas = verdict.evidence[0].notes.get("replicas") if 0 in verdict.evidence else None
        if replicas:
            parts.append(f"{replicas} replicas ran")
    if comparison is not None and comparison.parameters:
        parts.append(
            f"{len(comparison.parameters)} parameters ({comparison.elements} elements) compared "
            f"on {len(comparison.ranks)} {plural(len(comparison.ranks), 'rank')}"
        )
    noise = (
        [one.name for one in comparison.parameters if one.limit.only_rounding and one.norm]
        if comparison
        else []
    )
    if noise:
        parts.append(f"of these hold nothing but rounding: {', '.join(noise[:4])}")
    parts.append(_place(verdict))
    lines = wrapped(f"Evidence: {'; '.join(part for part in parts if part)}", "  ")
    closer = [part for part in _closer_look(verdict) if part]
    if closer:
        lines += wrapped(f"On a closer look at a second run: {'; '.join(closer)}", "  ")
    if verdict.planted:
        lines += wrapped(f"Planted:  {verdict.planted}, on purpose", "  ")
    lines += wrapped(f"Case:     {verdict.case}", "  ")
    if verdict.outcome == "different":
        how = "--export-repro DIR (of pytest: --ddp-export-repro DIR)"
        lines += wrapped(f"Script:   {how} writes this as one plain torch script", "  ")
    if verdict.repeat:
        lines.append(f"  Repeat:   {verdict.repeat}")  # in one piece, to be pasted
    return lines


def _place(verdict: Verdict) -> str:
    lane = verdict.lane
    devices = sorted({one.device for one in verdict.evidence.values()}) or [lane.device_type]
    where = f"{lane.name} ({lane.reason})" if lane.reason else lane.name
    return f"{where}, torch {torch.__version__}, {', '.join(devices)}"


def _ledger(verdict: Verdict) -> str:
    if verdict.case.shards == OWN:
        return "the step takes its own examples"
    if len(verdict.evidence) != verdict.case.ranks.world_size:
        return ""
    given = Counter(
        (step, index)
        for one in verdict.evidence.values()
        for step, indices in enumerate(one.examples or ())
        for index in indices
    )
    total = sum(verdict.examples)
    once = sum(count == 1 for count in given.values())
    return f"{once} of {total} examples given to one rank each"


def _collectives(verdict: Verdict) -> str:
    logs = [one.collectives for one in verdict.evidence.values()]
    if not logs or logs[0] is None:
        return ""
    forgotten = sum(one.elements for one in logs[0] if one.op == FORGOTTEN)
    counts = Counter((one.op, bool(one.group)) for one in logs[0] if one.op != FORGOTTEN)
    elements: Counter[tuple[str, bool]] = Counter()
    for one in logs[0]:
        elements[one.op, bool(one.group)] += one.elements
    if not counts:
        return "no collective ran"
    found = [
        f"{count} {op} of {elements[op, apart]} {plural(elements[op, apart], 'element')}"
        f"{' in a group of its own' if apart else ''}"
        for (op, apart), count in counts.items()
    ]
    before = f" (and {forgotten} earlier ones, no longer held)" if forgotten else ""
    return f"rank 0 issued {', '.join(found)}{before}"


def _closer_look(verdict: Verdict) -> Iterator[str]:
    if not verdict.observed:
        return
    if verdict.repeated is not None:
        yield "the same bits again" if verdict.repeated else "OTHER BITS than the first"
    yield _read(verdict)
    yield from _wrappers(verdict)
    yield _losses(verdict)
    yield _buffers(verdict)


def _read(verdict: Verdict) -> str:
    """Which examples went through the model."""
    read = {rank: one.read(0) for rank, one in verdict.observed.items()}
    if any(one is None for one in read.values()):
        return "which examples the model was called with could not be recognised"
    total = sum(verdict.examples)
    if len(verdict.examples) > 1:
        steps = range(len(verdict.examples))
        read = {
            rank: tuple(part for step in steps for part in one.read(step) or ())
            for rank, one in verdict.observed.items()
        }
    counted = Counter(i for parts in read.values() for part in parts or () for i in part)
    never = [index for index in range(total) if not counted[index]]
    twice = sorted(index for index, times in counted.items() if times > 1)
    told = f"{len(counted)} of {total} examples read"
    if twice:
        told += f", more than once {example_numbers(twice)}"
    if never:
        told += f", never {example_numbers(never)}"
    micro = {len(parts or ()) for parts in read.values()}
    if max(micro) > len(verdict.examples):
        told += f", in {max(micro)} micro-batches a rank"
    return told


def _wrappers(verdict: Verdict) -> Iterator[str]:
    found = {rank: one.wrappers for rank, one in verdict.observed.items()}
    first = next(iter(found.values()))
    if not any(found.values()):
        if not verdict.lane.name.endswith("data_parallel") and verdict.lane.name != "emulated":
            yield "no DistributedDataParallel"
        return
    for one in first:
        yield _wrapper(one)


def _wrapper(one: Wrapper) -> str:
    on, forwards = sum(one.synchronised), len(one.synchronised)
    if not forwards:
        return "a DistributedDataParallel that was never called"
    told = [
        f"{forwards} forward {plural(forwards, 'pass', 'passes')}, {on} with synchronisation on"
    ]
    if one.freed:
        told.append("FREED before backward")
    if one.buckets:
        told.append(f"{len(one.buckets)} {plural(len(one.buckets), 'bucket')}")
    if one.ignored:
        told.append(f"told to ignore {', '.join(one.ignored[:4])}")
    if "comm_hook" in one.logged:
        told.append(f"communication hook {one.logged['comm_hook']}")
    if one.logged.get("find_unused_parameters"):
        told.append("looks for unused parameters")
    if one.logged.get("static_graph"):
        told.append("static graph")
    return f"DistributedDataParallel: {', '.join(told)}"


def _losses(verdict: Verdict) -> str:
    """Where backward began, on every rank."""
    values = {rank: [one.loss for one in seen.backwards] for rank, seen in verdict.observed.items()}
    if not any(values.values()) or any(v is None for of in values.values() for v in of):
        return ""
    told = {
        rank: " ".join(f"{value:.4g}" for value in of_rank[:4])
        + (" ..." if len(of_rank) > 4 else "")
        for rank, of_rank in values.items()
    }
    shown = "; ".join(f"rank {rank} {text}" for rank, text in list(told.items())[:8])
    text = f"backward began at these losses: {shown}"
    if len(set(told.values())) == 1 and len(told) > 1:
        text = f"backward began at a loss of {next(iter(told.values()))} on every rank"
    localisation = verdict.localisation
    whole, mean = localisation.big_batch_loss, localisation.mean_rank_loss
    if whole is None or mean is None:
        return text
    if abs(whole - mean) <= SAME_LOSS * abs(whole):
        return f"{text} (their mean is the big batch's loss)"
    return f"{text} (their mean is {mean:.4g}, the big batch's loss {whole:.4g})"


def at_the_loss(verdict: Verdict, whole: float) -> str:
    """Which ranks are at the big batch's loss, or at the world size times that; "" if none is."""
    world_size = verdict.case.ranks.world_size
    losses = {
        rank: sum(one.loss or 0.0 for one in seen.backwards)
        for rank, seen in verdict.observed.items()
    }
    for times in (1, world_size):
        there = [r for r, at in losses.items() if abs(at - times * whole) <= SAME_LOSS * abs(at)]
        if there and world_size > 1:
            others = [rank for rank in losses if rank not in there]
            what = "at that" if times == 1 else f"at {times} times that"
            but = f", not on {of_ranks(others)}" if others else ""
            return f"{what} on {of_ranks(there)}{but}"
    return ""


def _buffers(verdict: Verdict) -> str:
    groups: dict[str, list[int]] = {}
    for rank, one in verdict.observed.items():
        groups.setdefault(one.buffers, []).append(rank)
    if len(groups) == 1:
        return ""
    told = "; ".join(of_ranks(ranks) for ranks in groups.values())
    return f"buffers differ afterwards: {told}"
