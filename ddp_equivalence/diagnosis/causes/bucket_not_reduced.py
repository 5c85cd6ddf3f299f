"""The gradients of some of DDP's buckets were not reduced."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.reduced import with_reduced_gradients
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

NAMES_SHOWN = 4


def predict(view: View) -> Sequence[Prediction]:
    """Some parameters kept local, where DDP was seen to have several buckets."""
    several = any(len(wrapper.buckets) > 1 for wrapper in view.observed.wrappers)
    return unreduced_in_part(view) if several else ()


def unreduced_in_part(view: View) -> Sequence[Prediction]:
    """Some parameters kept local, unless a gradient of theirs was seen to be reduced."""
    reduced = view.measured.differing & with_reduced_gradients(view)
    return () if reduced else kept_local_in_part(view)


def kept_local_in_part(view: View) -> Sequence[Prediction]:
    """Every rank's local gradient of the parameters that differ; the others are right."""
    if view.world_size == 1 or not view.setting.every_rank_reports:
        return ()
    if not view.measured.only_some_parameters_differ:
        return ()
    differing = view.measured.differing
    names = ", ".join(sorted(differing)[:NAMES_SHOWN])
    detail = names + (", ..." if len(differing) > NAMES_SHOWN else "")
    places = view.parameters.positions_of(sorted(differing))
    candidates = [
        (view.on_reporting_ranks(local), False)
        for local in view.local_gradients
        # Where the ranks have computed the same, their mean is what each of them has.
        if not nearly_equal(local[:, places], local[:, places].mean(0).expand(len(local), -1))
    ]
    if view.observed_gradients is None and view.measured.ranks_differ:
        # The local gradients are unknown: take those whose mean is the big batch.
        measured = view.measured.by_rank
        candidates.append((measured - measured.mean(0) + view.expected, True))
    right, combined = view.expected_by_rank, view.parameters.combined
    return tuple(
        Prediction(combined(local, right, differing), detail, fitted)
        for local, fitted in candidates
    )


def differing_buckets(view: View) -> list[tuple[str, ...]] | None:
    """The buckets that the differing parameters fill.

    None if they do not fill whole buckets, or if the buckets are not known.
    """
    differing = view.measured.differing
    for wrapper in view.observed.wrappers:
        buckets = [bucket for bucket in wrapper.buckets if differing.intersection(bucket)]
        if buckets and set().union(*buckets) == differing:
            return buckets
    return None


def indication(view: View) -> Indication | None:
    """Compares the parameters that differ with DDP's buckets."""
    if not any(wrapper.buckets for wrapper in view.observed.wrappers):
        return None
    buckets = differing_buckets(view)
    if buckets is None:
        return Indication(False, "the parameters that differ are not whole buckets of DDP")
    if all(len(bucket) == 1 for bucket in buckets):
        return None
    plural = "s" if len(buckets) > 1 else ""
    return Indication(True, f"these parameters are {len(buckets)} whole bucket{plural} of DDP")


def lines(view: View) -> Sequence[PointedLine]:
    """The communication hook and what it reduces; without one, where DDP was made."""
    calls = view.observed.calls
    hooks = communication_hooks(view)
    if not hooks:
        return [
            place.pointed(f"DDP did not reduce {_concerned(view)}", is_fault=True)
            for place in calls.places(Kind.WRAP)[-1:]
        ]
    reduces = calls.places(Kind.COLLECTIVE, where=lambda call: call.in_backward)
    pointed = []
    for place in reduces[-1:]:
        decided = lines_that_left_out(view, place)
        note = f"reduced {counted(len(place.calls), 'bucket')}, and not {_concerned(view)}"
        pointed += [*decided, place.pointed(note, is_fault=True)]
    hook = hooks[-1].pointed(f"register_comm_hook({hooks[-1].first.what})", is_fault=not pointed)
    return [hook, *pointed]


def communication_hooks(view: View) -> list[CallSite]:
    """The lines that gave DDP a communication hook."""
    return view.observed.calls.places(Kind.HOOK)


def _concerned(view: View) -> str:
    return names_text(sorted(view.measured.differing))


def fix(view: View) -> str:
    """Reduce every bucket."""
    left_out = _concerned(view)
    if communication_hooks(view):
        return f"let the communication hook reduce every bucket, also that of {left_out}."
    return f"use {left_out} in every forward pass, or give DDP find_unused_parameters=True."


HYPOTHESIS = Hypothesis(
    name="bucket_not_reduced",
    sentence="The gradients of a whole bucket of DDP were not reduced: every rank holds its own "
    "gradients of these parameters.",
    look_at="a communication hook that returns a bucket unchanged, or a bucket that never becomes "
    "ready because one of its parameters gets no gradient",
    predict=predict,
    indication=indication,
    tell_apart="Use buckets of several parameters (a larger bucket_cap_mb).",
    headline="a bucket of DDP is not reduced",
    lines=lines,
    fix=fix,
)
