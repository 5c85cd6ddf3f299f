"""Gradients, or some of them, stay on their rank: nothing reduces them, or not what it should."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    divided_by_ranks,
    indication_if,
    where_all_report,
)
from ddp_equivalence.diagnosis.lines.of_reduction import (
    ignored_by_fsdp,
    lines_of_no_sync,
    lines_of_sharding,
    lines_that_keep_from_reducing,
    lines_that_left_out,
    sharded_names,
)
from ddp_equivalence.diagnosis.lines.source import classes_in, holds, place_of, run_lines
from ddp_equivalence.diagnosis.lines.words import counted, first_of, in_order, last_of, names_text
from ddp_equivalence.diagnosis.reduced import (
    gradients_were_reduced,
    reduced_parameters,
    unequal_copies,
    with_reduced_gradients,
)
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import REDUCING, CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Contents, Kind
from ddp_equivalence.measurement.observation import Observation

BY_CALLS = (
    "Gradients alone cannot decide: look at what was called, with which flags, and which "
    "collectives ran."
)

OTHER_BUCKETS = "Use buckets of several parameters (a larger bucket_cap_mb)."


def _kept_local(
    view: View, names: Collection[str] | None = None, detail: str = "", divisor: int = 1
) -> Iterator[Prediction]:
    """Every rank's own gradient of these parameters, or of all; the others are right."""
    for local in view.local_gradients:
        held = view.on_reporting_ranks(local / divisor)
        if names is not None and not set(names) >= set(view.parameters.names):
            held = view.parameters.combined(held, view.expected_by_rank, frozenset(names))
        yield Prediction(held, detail)


def _all_kept_local(view: View) -> Sequence[Prediction]:
    """Every rank's local gradient, unless gradients were seen to be reduced.

    If the local gradients are unknown, those whose mean, or whose sum, is the big batch. These fit
    whatever has the right mean, so it must be certain that no gradient was reduced.
    """
    measured, reduced = view.measured, gradients_were_reduced(view)
    if reduced:
        return ()
    known = view.observed_gradients is not None or not measured.is_known or reduced is not False
    if known or measured.only_some_parameters_differ or not measured.ranks_differ:
        if measured.is_known and nearly_equal(measured.by_rank.sum(0), view.expected):
            detail = "their sum is the big batch"
            return [*_kept_local(view), *_kept_local(view, None, detail, view.world_size)]
        return list(_kept_local(view))
    deviations = measured.by_rank - measured.by_rank.mean(0)
    total = deviations + view.expected / view.world_size
    return (
        *_kept_local(view),
        Prediction(deviations + view.expected, fitted=True),
        Prediction(total, "their sum is the big batch", fitted=True),
    )


def _nothing_reduced(view: View) -> Indication | None:
    if not view.observed.by_rank or reduced_parameters(view) or view.observed.wrappers:
        return None
    if _is_given_to_replicate(view):
        return Indication(False, "a module was given to replicate")
    because = "no gradient went through a collective, and there was no wrapper"
    return Indication(True, because) if gradients_were_reduced(view) is False else None


def _lines_that_reduce_nothing(view: View) -> Sequence[PointedLine]:
    """The hook that reduces nothing, or the last backward, after which nothing is reduced."""
    calls = view.observed.calls
    for hook in calls.places(Kind.HOOK)[-1:]:
        reduces = calls.collectives(lambda call, of: call.in_backward)
        note = "" if reduces else "no collective was seen in this hook"
        return [hook.pointed(note, True)]
    if calls.reductions:
        return ()
    unequal = unequal_copies(view)
    if unequal is not None and unequal.call.at is not None and unequal.is_taken_apart:
        return [PointedLine(unequal.call.at, unequal.note, True)]
    missing = f"an all_reduce of every gradient over {view.world_size} ranks"
    alone = [] if view.observed.wrappers else calls.backwards
    note = "no collective reduces its gradients"
    return lines_that_keep_from_reducing(view) or last_of(alone, note, True, missing)


def _mend_nothing_reduced(view: View) -> str:
    if not view.observed.calls.reductions and lines_that_keep_from_reducing(view):
        return "let the reduction run that is there: the marked line keeps it from running."
    if view.observed.calls.places(Kind.HOOK):
        return f"reduce each bucket in the hook{divided_by_ranks(view)}."
    unequal = unequal_copies(view)
    if unequal is not None and unequal.is_taken_apart:
        return f"{unequal.fix}{divided_by_ranks(view)}."
    return f"all_reduce each gradient over {view.world_size} ranks{divided_by_ranks(view)}."


def _wrapper_called(view: View) -> Indication | None:
    """Counts the forward passes of every DistributedDataParallel."""
    wrappers = view.observed.wrappers
    if not view.observed.by_rank:
        return None
    if not wrappers:
        return Indication(False, "there was no DistributedDataParallel")
    return indication_if(
        not any(wrapper.synchronised for wrapper in wrappers),
        "the model was called, but its DistributedDataParallel never was",
        "DistributedDataParallel itself was called",
        conclusive=True,
    )


def _lines_past_the_wrapper(view: View) -> Sequence[PointedLine]:
    """Where the model is wrapped, and where it is called without the wrapper."""
    calls = view.observed.calls
    wrapped = calls.places(Kind.WRAP)
    wrappers = {place.first.what for place in wrapped}
    direct = calls.places(Kind.FORWARD, where=lambda call: call.what not in wrappers)
    called = [
        PointedLine(place.first.chosen_at or place.line, "the module itself is called", True)
        for place in direct[:1]
    ]
    made = last_of(wrapped, "the wrapper is made", is_fault=False)
    return in_order(view, *made, *(called or _lines_that_call_a_part(view)))


def _is_given_to_replicate(view: View) -> bool:
    seen = view.observed.by_rank.values()
    return any(call.kind is Kind.REPLICATE for one in seen for call in one.calls)


def _never_called(view: View) -> Indication | None:
    """``replicate`` makes its DistributedDataParallel when the module is first called."""
    if not view.observed.by_rank:
        return None
    if not _is_given_to_replicate(view):
        return Indication(False, "no module was given to replicate")
    because = "the module that was given to replicate was never called itself"
    return indication_if(not view.observed.wrappers, because, "it was called", conclusive=True)


def _lines_past_the_hooks(view: View) -> Sequence[PointedLine]:
    given = view.observed.calls_of_all_steps.places(Kind.REPLICATE)
    return [
        *last_of(given, "reduces when this module is called", is_fault=False),
        *_lines_that_call_a_part(view),
        *last_of(view.observed.calls.backwards, "nothing reduces its gradients", is_fault=False),
    ]


def _lines_that_call_a_part(view: View) -> list[PointedLine]:
    """The line that calls a method of the model, or else the one that calls a module in it."""
    run, seen = run_lines(view), next(iter(view.observed.by_rank.values()), None)
    calls = [one for one in seen.trace.module_calls if one.line is not None] if seen else []
    called = {
        node.func.attr: place.line(node)
        for file, node in run.nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (place := place_of(file, node.lineno)) is not None and place.line(node) in run.times
    }
    inside = [one.line for one in sorted(calls, key=lambda one: one.name.count(".")) if one.line]
    methods = (one.line.function for one in calls if one.line and _is_of_a_module(one.line))
    line = next((called[one] for one in methods if one in called), next(iter(inside), None))
    return [PointedLine(line, "calls a method or a part of it", True)] if line else []


def _is_of_a_module(line: CodeLine) -> bool:
    """True for a line of a class that says how it goes forward, as modules do."""
    return any(
        holds(one, line.number)
        and any(isinstance(of, ast.FunctionDef) and of.name == "forward" for of in one.body)
        for one in classes_in(line.file)
    )


def _synchronised(view: View) -> Indication | None:
    """Looks at whether synchronisation was on in each forward pass."""
    if not view.observed.by_rank:
        return None
    synchronised = [flag for one in view.observed.wrappers for flag in one.synchronised]
    if not synchronised:
        return Indication(False, "no DistributedDataParallel was called")
    return indication_if(
        not any(synchronised),
        f"synchronisation was off in all {len(synchronised)} forward passes (of all ranks)",
        "synchronisation was on in a forward pass",
        conclusive=True,
    )


def lines_without_synchronisation(view: View, note: str) -> Sequence[PointedLine]:
    """The line that switches synchronisation off, or what decided that it is off, and the last
    backward with a note.
    """
    calls = view.observed.calls
    off = calls.places(Kind.SYNCHRONISATION, where=lambda call: not call.value)
    switched = lines_of_no_sync(view) or last_of(off, "switches synchronisation off")
    return in_order(view, *switched, *last_of(calls.backwards, note, is_fault=not switched))


def _wrapper_gone(view: View) -> Indication | None:
    if not view.observed.by_rank:
        return None
    return indication_if(
        any(wrapper.freed for wrapper in view.observed.wrappers),
        "the DistributedDataParallel that ran the forward pass was gone when backward began",
        "no DistributedDataParallel was freed before its backward",
        conclusive=True,
    )


def _lines_of_dropped_wrapper(view: View) -> Sequence[PointedLine]:
    """Where the wrapper is made that is freed, and the backward before which it is gone."""
    calls = view.observed.calls
    freed = {id(call) for seen in view.observed.by_rank.values() for call in _freed(seen)}
    made = calls.places(Kind.WRAP, where=lambda call: id(call) in freed)
    return in_order(
        view,
        *last_of(made, "nothing holds this wrapper until backward"),
        *last_of(calls.backwards, "the wrapper is gone here", is_fault=False),
    )


def _freed(seen: Observation) -> list[Call]:
    """The calls that made the wrappers of one rank that were freed before backward."""
    made = [call for call in seen.calls if call.kind is Kind.WRAP]
    if len(made) != len(seen.wrappers):
        return []
    return [call for call, wrapper in zip(made, seen.wrappers, strict=True) if wrapper.freed]


# Something else is reduced: parameters, or copies whose result nothing uses.


def _parameters_reduced(view: View) -> Indication | None:
    if not view.observed.by_rank:
        return None
    if gradients_were_reduced(view):
        return Indication(False, "gradients, or copies of them, were reduced")
    count = len(reduced_parameters(view))
    were = "parameter was" if count == 1 else "parameters were"
    because = f"{count} {were} all-reduced, and no gradient"
    return indication_if(count > 0, because, "no parameter was all-reduced")


def _lines_of_parameters(view: View) -> Sequence[PointedLine]:
    of_parameters = (Contents.PARAMETERS, Contents.COPIES_OF_PARAMETERS)
    places = view.observed.calls.collectives(
        lambda _, of: of.op in REDUCING and of.contents in of_parameters
    )
    return [
        place.pointed(
            f"reduces {counted(len(place.names), 'parameter')} ({names_text(place.names)}), "
            "not their gradients",
            is_fault=True,
        )
        for place in places[:2]
    ]


def _copies_alone(view: View) -> Sequence[Prediction]:
    """The local gradients of the parameters that were reduced as copies; the others are right."""
    copied, count = _copied_and_not_used(view), view.world_size
    if not copied:
        return ()
    divided = _kept_local(view, copied, f"each rank's own gradient, divided by {count}", count)
    return [one for both in zip(_kept_local(view, copied), divided, strict=True) for one in both]


def _copied_and_not_used(view: View) -> frozenset[str]:
    """The parameters whose gradients each rank reduced as copies, and did not write afterwards."""
    if not view.observed.covers_every_rank or view.world_size == 1:
        return frozenset()
    by_rank = [_of_rank(view.observed.calls.of(rank)) for rank in range(view.world_size)]
    return frozenset.intersection(*by_rank)


def _of_rank(calls: Sequence[Call]) -> frozenset[str]:
    unused: set[str] = set()
    for call in calls:
        if _reduces_copies(call):
            unused |= set(_copied_by(call))
        elif call.kind is Kind.COLLECTIVE and call.collective is not None:
            if call.collective.contents is Contents.GRADIENTS:
                unused -= set(call.collective.names)
        elif call.change is not None and call.rewrites:
            unused -= set(call.change.names)
    return frozenset(unused)


def _reduces_copies(call: Call) -> bool:
    collective = call.collective
    if collective is None or collective.op not in REDUCING or len(collective.ranks) < 2:
        return False
    return collective.contents is Contents.COPIES_OF_GRADIENTS or bool(collective.parts_of)


def _copied_by(call: Call) -> tuple[str, ...]:
    """The parameters of whose gradients a collective reduces copies, or copies of some elements."""
    return () if call.collective is None else call.collective.names or call.collective.parts_of


def _copies_not_used(view: View) -> Indication | None:
    count, total = len(_copied_and_not_used(view)), len(view.parameters.names)
    because = f"copies of {count} of {total} gradients were reduced, and these gradients were not "
    return Indication(True, f"{because}written afterwards") if count else None


def _reductions_of_copies(view: View) -> list[CallSite]:
    unused = _copied_and_not_used(view)

    def is_unused(call: Call) -> bool:
        return _reduces_copies(call) and bool(unused & set(_copied_by(call)))

    return view.observed.calls.places(Kind.COLLECTIVE, where=is_unused)


def _lines_of_copies(view: View) -> Sequence[PointedLine]:
    """Where the copies are made and reduced, and which others were written instead."""
    shown = [one for place in _reductions_of_copies(view)[:2] for one in _lines_of(place)]
    unused = _copied_and_not_used(view)
    written = view.observed.calls.changes(lambda call: call.rewrites and call.backwards > 0)
    for place in reversed(written):
        if not unused & set(place.names):
            note = f"writes {names_text(place.names)}, not {names_text(sorted(unused))}"
            decided = lines_that_left_out(view, place)
            return [*shown, *decided, place.pointed(note, is_fault=True)]
    return shown


def _lines_of(place: CallSite) -> list[PointedLine]:
    """The line that reduces copies, after the one that made them."""
    names = sorted({name for call in place.calls for name in _copied_by(call)})
    note = f"reduces a copy: .grad of {names_text(names)} stays as it is"
    made = place.first.made_at
    makes = [] if made in (None, place.line) else [made]
    return [
        *(PointedLine(one, f"makes what line {place.line.number} reduces") for one in makes if one),
        place.pointed(note, True, "copy the result back into each .grad"),
    ]


def kept_local_in_part(view: View) -> Sequence[Prediction]:
    """Every rank's local gradient of the parameters that differ; the others are right."""
    if not where_all_report(view) or not view.measured.only_some_parameters_differ:
        return ()
    differing, measured = view.measured.differing, view.measured.by_rank
    detail = names_text(sorted(differing))
    places = view.parameters.positions_of(sorted(differing))
    candidates = zip(_kept_local(view, differing, detail), view.local_gradients, strict=True)
    found = [
        one
        for one, local in candidates
        # Where the ranks have computed the same, their mean is what each of them has.
        if not nearly_equal(local[:, places], local[:, places].mean(0).expand(len(local), -1))
    ]
    if view.observed_gradients is None and view.measured.ranks_differ:
        # The local gradients are unknown: take those whose mean is the big batch.
        held = measured - measured.mean(0) + view.expected
        held = view.parameters.combined(held, view.expected_by_rank, differing)
        found.append(Prediction(held, detail, fitted=True))
    return found


def _unreduced_in_part(view: View) -> Sequence[Prediction]:
    """Some parameters kept local, unless a gradient of theirs was seen to be reduced."""
    reduced = view.measured.differing & with_reduced_gradients(view)
    return () if reduced else kept_local_in_part(view)


def _of_buckets(view: View) -> Sequence[Prediction]:
    """Some parameters kept local, where DDP was seen to have several buckets."""
    several = any(len(wrapper.buckets) > 1 for wrapper in view.observed.wrappers)
    return _unreduced_in_part(view) if several else ()


def _differing_buckets(view: View) -> list[tuple[str, ...]] | None:
    """The buckets that the differing parameters fill.

    None if they do not fill whole buckets, or if the buckets are not known.
    """
    differing = view.measured.differing
    for wrapper in view.observed.wrappers:
        buckets = [bucket for bucket in wrapper.buckets if differing.intersection(bucket)]
        if buckets and set().union(*buckets) == differing:
            return buckets
    return None


def _whole_buckets(view: View) -> Indication | None:
    buckets = _differing_buckets(view)
    if not any(wrapper.buckets for wrapper in view.observed.wrappers):
        return None
    if buckets is None:
        return Indication(False, "the parameters that differ are not whole buckets of DDP")
    because = f"these parameters are {counted(len(buckets), 'whole bucket')} of DDP"
    return Indication(True, because) if any(len(bucket) > 1 for bucket in buckets) else None


def _left_out(view: View) -> str:
    return names_text(sorted(view.measured.differing))


def _lines_of_buckets(view: View) -> Sequence[PointedLine]:
    """The communication hook and what it reduces; without one, where DDP was made."""
    calls = view.observed.calls
    hooks = calls.places(Kind.HOOK)
    if not hooks:
        return last_of(calls.places(Kind.WRAP), f"DDP did not reduce {_left_out(view)}")
    pointed: list[PointedLine] = []
    for place in calls.places(Kind.COLLECTIVE, where=lambda call: call.in_backward)[-1:]:
        note = f"reduced {counted(len(place.calls), 'bucket')}, and not {_left_out(view)}"
        pointed = [*lines_that_left_out(view, place), place.pointed(note, is_fault=True)]
    note = f"register_comm_hook({hooks[-1].first.what})"
    return [*last_of(hooks, note, is_fault=not pointed), *pointed]


def _others_reduced(view: View) -> Indication | None:
    """Compares the parameters that differ with what DDP ignores, and with what was reduced."""
    differing, wrappers = view.measured.differing, view.observed.wrappers
    ignored = {name for wrapper in wrappers for name in wrapper.ignored}
    if ignored and differing <= ignored:
        return Indication(True, "DDP was told to ignore these parameters")
    sharded = sharded_names(view)
    if sharded and differing and differing <= ignored_by_fsdp(view):
        return Indication(False, "FSDP was told to ignore these parameters")
    if sharded and not differing & sharded:
        return Indication(True, "FSDP was not given these parameters, and reduces only others")
    reduced, elements = view.observed.reduced_floats, view.parameters.total
    if not wrappers and reduced == elements - view.parameters.total_of(differing):
        because = f"{reduced} of {elements} elements were all-reduced: all except theirs"
        return Indication(True, because)
    if any(len(bucket) > 1 for bucket in _differing_buckets(view) or ()):
        return Indication(False, "the parameters that differ are whole buckets of DDP")
    return None


def _lines_of_others(view: View) -> Sequence[PointedLine]:
    """The loop or buffer that reduces the others; under DDP, where it was told to ignore some."""
    if view.observed.calls.places(Kind.HOOK):
        return _lines_of_buckets(view)
    calls, differing = view.observed.calls, view.measured.differing
    kept_out = [replace(one, is_fault=True) for one in _lines_that_keep_out(view)]
    for last in reversed([one for one in calls.reductions if not differing & set(one.names)]):
        decided = lines_that_left_out(view, last)
        note = f"reduces {counted(len(last.names), 'gradient')}, not that of {_left_out(view)}"
        shown = decided[:1] if kept_out else decided
        return [*kept_out[:1], *shown, last.pointed(note)]
    unreached = [] if calls.reductions or kept_out else lines_that_keep_from_reducing(view)
    note = f"DDP did not reduce {_left_out(view)}"
    wrapped = last_of(calls.places(Kind.WRAP), note, is_fault=not kept_out)
    return unreached or [*kept_out, *wrapped]


def _lines_that_keep_out(view: View) -> list[PointedLine]:
    """The lines that keep these parameters from DDP or from FSDP, the last one first."""
    differing = view.measured.differing
    sharded = sharded_names(view)
    if sharded and not differing & sharded:
        return lines_of_sharding(view)
    ignored = {name for wrapper in view.observed.wrappers for name in wrapper.ignored}
    told = view.observed.calls.places(Kind.IGNORE) if differing <= ignored else []
    return last_of(told)


def _mend_others(view: View) -> str:
    left_out = _left_out(view)
    if sharded_names(view):
        return f"do not keep {left_out} from FSDP, which averages what it is given."
    if not view.observed.wrappers:
        return f"all_reduce the gradient of {left_out} as others are, with the same divisor."
    if view.observed.calls.reductions:
        either = f"all_reduce {left_out} too, as is done with other gradients"
        return either + (", or do not keep them from DDP." if _lines_that_keep_out(view) else ".")
    if any(wrapper.ignored for wrapper in view.observed.wrappers):
        return f"do not let DDP ignore {left_out}."
    return (
        f"wrap the model when it already has {left_out} with requires_grad=True, and use the "
        "wrapper in every iteration."
    )


def _in_a_later_step(view: View) -> Sequence[Prediction]:
    """Every rank's own gradient of what differs, in a step that leaves a parameter out."""
    unused = _unused_now(view)
    some = view.measured.differing if view.measured.only_some_parameters_differ else None
    return list(_kept_local(view, some, f"without {names_text(unused)}")) if unused else ()


def _unused_now(view: View) -> tuple[str, ...]:
    """The parameters that got a gradient in the first step and none in this one.

    () unless DDP was to reduce gradients in this step.
    """
    wrappers = view.observed.wrappers
    if view.setting.step == 0 or not view.observed.covers_every_rank:
        return ()
    if not any(any(one.synchronised) for one in wrappers) or not _called_ddp(view):
        return ()
    if all(one.logged.get("find_unused_parameters") for one in wrappers):
        return ()  # DDP does not wait for what it has found unused
    # The steps before were right, so they used what is in a bucket: DDP would have waited for it.
    frozen = {name for seen in view.observed.by_rank.values() for name in seen.frozen}
    in_buckets = [name for one in wrappers for bucket in one.buckets for name in bucket]
    known = {*view.parameters.places, *frozen, "?"}
    found = dict.fromkeys(name for name in in_buckets if name not in known)
    for seen in view.observed.by_rank.values():
        first, now = (_with_gradient(view, seen, step) for step in (0, view.setting.step))
        if now:
            found |= dict.fromkeys(name for name in view.parameters.names if name in first - now)
    return tuple(found)


def _called_ddp(view: View) -> bool:
    """True if every rank called a DDP in this step."""
    return all(
        any(
            call.kind is Kind.FORWARD and "DataParallel" in call.what
            for call in view.observed.calls.of(rank)
        )
        for rank in range(view.world_size)
    )


def _with_gradient(view: View, seen: Observation, step: int) -> set[str]:
    """The parameters that the first backward of the step gave a gradient."""
    for gradient in [one.gradient for one in seen.backwards if one.step == step][:1]:
        if gradient is not None and len(gradient) == len(view.expected):
            places = view.parameters.places
            return {name for name, place in places.items() if bool(gradient[place].any())}
    return set()


def _is_static(view: View) -> bool:
    """True if a DDP was told that its graph never changes."""
    return any(bool(wrapper.logged.get("static_graph")) for wrapper in view.observed.wrappers)


def _other_graph(view: View) -> Indication | None:
    unused = _unused_now(view)
    static = "; static_graph was set" if _is_static(view) else ""
    because = (
        f"{names_text(unused)} had a gradient in step 1 and none in step {view.setting.step + 1}, "
        f"so that DDP waited for the rest of a bucket{static}"
    )
    return Indication(True, because) if unused else None


def _lines_of_graph(view: View) -> Sequence[PointedLine]:
    """Where DDP was made, and the backward in which it reduced nothing."""
    setting = "static_graph=True" if _is_static(view) else "find_unused_parameters=False"
    note = f"in step {view.setting.step + 1} it reduces nothing of {names_text(_unused_now(view))}"
    return [
        *last_of(view.observed.calls_of_all_steps.places(Kind.WRAP), f"made with {setting}"),
        *first_of(view.observed.calls.backwards, note, is_fault=False),
    ]


_unreduced = partial(
    Hypothesis, tell_apart=BY_CALLS, applies=where_all_report, held=_all_kept_local
)

NO_GRADIENT_REDUCED = (
    _unreduced(
        name="reduced_buffer_not_used",
        sentence="Copies of the gradients were reduced, and the result was not written back: every "
        "rank holds the gradient of its own shard.",
        look_at="the flat buffer or temporary tensor that is given to all_reduce, and the lines "
        "after it, which must copy the result into parameter.grad",
        headline="the all-reduced buffer is not used",
        held=_copies_alone,
        indication=_copies_not_used,
        lines=_lines_of_copies,
        mend="write what was reduced back into each .grad{averaged}.",
    ),
    _unreduced(
        name="no_all_reduce",
        sentence="No gradient was reduced: every rank holds the gradient of its own shard.",
        look_at="the call of the wrapper (ddp(...), not ddp.module(...)), no_sync, and whether the "
        "wrapper is still alive when backward runs",
        headline="gradients are never reduced",
        indication=_nothing_reduced,
        lines=_lines_that_reduce_nothing,
        mend=_mend_nothing_reduced,
        limits_must_catch=True,
    ),
    _unreduced(
        name="replicated_module_not_called",
        sentence="The module that was given to replicate was never called itself, but only its "
        "methods or parts: the hooks that reduce its gradients never ran.",
        look_at="where the outputs are computed: call the module, whose forward may call its "
        "methods",
        headline="the replicated module is never called",
        indication=_never_called,
        lines=_lines_past_the_hooks,
        mend="call the module that replicate was given, not a method or a part of it.",
    ),
    _unreduced(
        name="raw_module_called",
        sentence="The model was called directly, not through its DistributedDataParallel, whose "
        "hooks then never fire.",
        look_at="the forward pass: call ddp(...), not ddp.module(...) or the model that was "
        "wrapped",
        headline="the module is called, not its wrapper",
        indication=_wrapper_called,
        lines=_lines_past_the_wrapper,
        mend="call the DistributedDataParallel in the forward pass, not the module that it wraps.",
    ),
    _unreduced(
        name="no_sync_left_on",
        sentence="DistributedDataParallel was told not to synchronise in any forward pass, so "
        "nothing was reduced.",
        look_at="no_sync() that also encloses the last micro-batch, or require_backward_grad_sync "
        "left at False: DDP reads this flag in the forward pass, not in the backward",
        headline="synchronisation stays off in every forward",
        indication=_synchronised,
        lines=lambda view: lines_without_synchronisation(
            view, "DDP reduces nothing in this backward"
        ),
        mend=lambda view: (
            "run the last forward pass of a step outside no_sync."
            if lines_of_no_sync(view)
            else "set require_backward_grad_sync=True before the last forward pass of a step."
        ),
    ),
    _unreduced(
        name="wrapper_dropped",
        sentence="The DistributedDataParallel was freed before backward, so nothing was reduced.",
        look_at="the variable that holds the wrapper: it must live until backward has ended, and "
        "loss(DDP(model), ...) has none",
        headline="the wrapper is freed before backward",
        indication=_wrapper_gone,
        lines=_lines_of_dropped_wrapper,
        mend="keep the DistributedDataParallel in a variable that lives until backward has ended.",
    ),
    _unreduced(
        name="parameters_reduced_not_gradients",
        sentence="Parameters were all-reduced where gradients were meant: every rank holds the "
        "gradient of its own shard.",
        look_at="what is given to all_reduce: parameter.grad, not parameter or parameter.data",
        headline="parameters are all-reduced, not gradients",
        indication=_parameters_reduced,
        lines=_lines_of_parameters,
        mend="all_reduce parameter.grad, not parameter{divided}.",
    ),
)

SOME_NOT_REDUCED = (
    Hypothesis(
        name="graph_changed",
        sentence="DDP reduced gradients in the first step, and not in a later step that leaves out "
        "a parameter: DDP waits for its gradient, and reduces nothing of its bucket.",
        look_at="static_graph=True, or find_unused_parameters left at False, with a head or branch "
        "that is not used in every step",
        headline="a later step leaves a parameter out",
        tell_apart="Take a single step, or the same parameters in all steps.",
        applies=where_all_report,
        held=_in_a_later_step,
        indication=_other_graph,
        lines=_lines_of_graph,
        mend=lambda view: (
            "make DDP with find_unused_parameters=True"
            + (", no static_graph" if _is_static(view) else "")
            + ", or use every parameter."
        ),
    ),
    Hypothesis(
        name="bucket_not_reduced",
        sentence="The gradients of a whole bucket of DDP were not reduced: every rank holds its "
        "own gradients of these parameters.",
        look_at="a communication hook that returns a bucket unchanged, or a bucket that never "
        "becomes ready because one of its parameters gets no gradient",
        headline="a bucket of DDP is not reduced",
        tell_apart=OTHER_BUCKETS,
        held=_of_buckets,
        indication=_whole_buckets,
        lines=_lines_of_buckets,
        mend="reduce every bucket in the hook, or use all parameters in every forward pass.",
    ),
    Hypothesis(
        name="parameter_not_reduced",
        sentence="Some parameters were not reduced: every rank holds its own gradient of them.",
        look_at="the loop, list or hand-written bucket that feeds all_reduce; under DDP, "
        "parameters that were replaced or added after the model was wrapped, that DDP was told to "
        "ignore, or that were unused in the first iteration",
        headline="some parameters are not reduced",
        tell_apart=OTHER_BUCKETS,
        held=_unreduced_in_part,
        indication=_others_reduced,
        lines=_lines_of_others,
        mend=_mend_others,
    ),
)
