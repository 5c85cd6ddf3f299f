"""The evidence: what really ran, and how to repeat it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ddp_equivalence.case.shards import OWN
from ddp_equivalence.diagnosis.buffers_beside import text_of_buffers
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.report.gpus import gpu_texts, tf32_texts
from ddp_equivalence.report.line import Line, Style, labelled
from ddp_equivalence.report.other_forms import other_form_texts
from ddp_equivalence.report.watched_run import watched_run_texts
from ddp_equivalence.report.wrapping import plural

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

MOST_NAMES = 4


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
