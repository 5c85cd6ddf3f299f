"""Some parameters were not reduced, and they are not whole buckets of DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes import bucket_not_reduced
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.lines.lines_of_wrapping import (
    lines_of_sharding,
    lines_that_keep_from_reducing,
    lines_that_return_before,
    sharded_names,
)
from ddp_equivalence.diagnosis.lines.of_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def indication(view: View) -> Indication | None:
    """Compares the parameters that differ with what DDP ignores, and with what was reduced."""
    differing, wrappers = view.measured.differing, view.observed.wrappers
    ignored = {name for wrapper in wrappers for name in wrapper.ignored}
    if ignored and differing <= ignored:
        return Indication(True, "DDP was told to ignore these parameters")
    sharded = sharded_names(view)
    if sharded and not differing & sharded:
        return Indication(True, "FSDP was not given these parameters, and reduces only others")
    reduced, elements = view.observed.reduced_elements, view.parameters.total
    if not wrappers and reduced == elements - view.parameters.total_of(differing):
        because = f"{reduced} of {elements} elements were all-reduced: all except theirs"
        return Indication(True, because)
    buckets = bucket_not_reduced.differing_buckets(view)
    if buckets is not None and any(len(bucket) > 1 for bucket in buckets):
        return Indication(False, "the parameters that differ are whole buckets of DDP")
    return None


def lines(view: View) -> Sequence[PointedLine]:
    """The loop or buffer that reduces the others; under DDP, where it was told to ignore some."""
    if bucket_not_reduced.communication_hooks(view):
        return bucket_not_reduced.lines(view)
    calls, differing = view.observed.calls, view.measured.differing
    kept_out = _lines_that_keep_out(view)
    left_out = names_text(sorted(differing))
    others = [place for place in calls.reductions if not differing & set(place.names)]
    if others:
        last = others[-1]
        decided = lines_that_left_out(view, last)
        decided = decided or lines_that_return_before(view, last.line.function)
        note = f"reduces {counted(len(last.names), 'gradient')}, not that of {left_out}"
        shown = decided[:1] if kept_out else decided
        keeps_out = [replace(one, is_fault=True) for one in kept_out[:1]]
        return [*keeps_out, *shown, last.pointed(note, is_fault=True)]
    unreached = [] if calls.reductions or kept_out else lines_that_keep_from_reducing(view)
    if unreached:
        return unreached
    note = f"DDP did not reduce {left_out}"
    wraps = calls.places(Kind.WRAP)[-1:]
    return [
        *(replace(one, is_fault=True) for one in kept_out),
        *(place.pointed(note, is_fault=not kept_out) for place in wraps),
    ]


def _lines_that_keep_out(view: View) -> list[PointedLine]:
    """The lines that keep these parameters from DDP or from FSDP, the last one first."""
    differing = view.measured.differing
    sharded = sharded_names(view)
    if sharded and not differing & sharded:
        return lines_of_sharding(view)
    ignored = {name for wrapper in view.observed.wrappers for name in wrapper.ignored}
    told = view.observed.calls.places(Kind.IGNORE) if differing <= ignored else []
    return [place.pointed() for place in told[-1:]]


def fix(view: View) -> str:
    """Reduce these too."""
    left_out, count = names_text(sorted(view.measured.differing)), len(view.parameters.names)
    if bucket_not_reduced.communication_hooks(view):
        return bucket_not_reduced.fix(view)
    if sharded_names(view):
        return f"do not keep {left_out} from FSDP, or all_reduce their gradients yourself."
    if not view.observed.wrappers:
        return f"all_reduce {left_out} too: go through all {count} parameters of the model."
    if view.observed.calls.reductions:
        either = f"all_reduce {left_out} too, as is done with other gradients"
        kept_out = _lines_that_keep_out(view)
        return f"{either}, or do not keep them from DDP." if kept_out else f"{either}."
    if any(wrapper.ignored for wrapper in view.observed.wrappers):
        return f"do not let DDP ignore {left_out}."
    return f"wrap the model after {left_out} became a part of it, and use it in every iteration."


HYPOTHESIS = Hypothesis(
    name="parameter_not_reduced",
    sentence="Some parameters were not reduced: every rank holds its own gradient of them.",
    look_at="the loop, list or hand-written bucket that feeds all_reduce; under DDP, parameters "
    "that were replaced or added after the model was wrapped, that DDP was told to ignore, or that "
    "were unused in the first iteration",
    predict=bucket_not_reduced.unreduced_in_part,
    indication=indication,
    tell_apart="Use buckets of several parameters (a larger bucket_cap_mb).",
    headline="some parameters are not reduced",
    lines=lines,
    fix=fix,
)
