"""Several backward passes of one step are added up, cleared or reduced at the wrong moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.causes.unreduced import (
    kept_local_in_part,
    lines_without_synchronisation,
)
from ddp_equivalence.diagnosis.examples_read import passes_of_read_examples
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    common_loss_factor,
    indication_if,
    losses_close,
    micro_batches_of_a_rank,
    on_every_rank,
    on_several_ranks,
    ranks_by_number,
    unrecognised_micro_batches,
    where_all_report,
)
from ddp_equivalence.diagnosis.lines.decisions import at_meeting
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss, line_that_scales_loss
from ddp_equivalence.diagnosis.lines.of_reduction import (
    backward_count,
    by_hand,
    lines_that_clear,
    sharded_names,
)
from ddp_equivalence.diagnosis.lines.words import counted, first_of, in_order, last_of
from ddp_equivalence.diagnosis.means_of_parts import gradients_by_backward
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

SURELY_DIVIDED = 0.9
"""A loss below this part of its micro-batch's loss was divided by something."""

WHOLE = 1e-3
"""A number that differs from a whole one by less is taken for it."""

MOST_MICRO_BATCHES = 4096

TWO_MICRO_BATCHES = "Use at least two micro-batches with different examples."


def _has_windows(view: View) -> bool:
    """True if a rank has several micro-batches."""
    return any(len(of_rank) != 1 for of_rank in view.parts.by_rank or ())


def _added_up(view: View) -> Sequence[Prediction]:
    """The sum over each rank's micro-batches, averaged over the ranks."""
    parts = view.parts.by_rank or ()
    if not _has_windows(view) or view.parts.add_up_to_the_big_batch:
        return ()
    sums = [torch.stack([view.examples.gradient(p) for p in of_rank]).sum(0) for of_rank in parts]
    detail = f"{max(map(len, parts))} micro-batches in the accumulation window"
    return on_every_rank(view, torch.stack(sums).mean(0), detail=detail)


def _number_of_micro_batches(view: View) -> Sequence[WrongFactor]:
    count = view.parts.micro_batches_per_rank
    if count is None or view.parts.add_up_to_the_big_batch:
        return ()
    what = "micro-batches"
    if count == 1:
        count, what = unrecognised_micro_batches(view), "backward passes"
    factor = WrongFactor(count, f"multiplied by {count}, the number of {what}")
    return (factor,) if count > 1 else ()


def _losses_divided(view: View) -> Indication | None:
    """Compares the losses at which backward began with those of the micro-batches."""
    factor = common_loss_factor(view)
    if factor is None or view.parts.micro_batches_per_rank in (None, 1):
        return None
    if losses_close(factor, 1.0):
        return Indication(True, "every backward began at the loss of its micro-batch, not divided")
    if factor < SURELY_DIVIDED:
        return Indication(False, "the losses of the micro-batches were divided")
    return None


def _lines_that_add_up(view: View) -> Sequence[PointedLine]:
    """Where the loss of a micro-batch is made, and backward, which adds it up."""
    count = micro_batches_of_a_rank(view)
    note = f"adds up {count} micro-batches"
    backward = view.observed.calls.backwards
    if count > 1 and line_that_scales_loss(view, 1 / count) is not None:
        return last_of(backward, note, is_fault=False)
    missing = f"a division by {count}"
    loss = line_of_loss(view, "the loss of one micro-batch, not divided", True, missing, True)
    if loss is not None and backward and loss.line == backward[-1].line:
        return [replace(loss, note=f"{note}, not divided")]
    return in_order(view, loss, *last_of(backward, note, is_fault=False))


def _divided_by_full(view: View) -> Sequence[Prediction]:
    """The ranks' windows, each divided by the same number, where their lengths differ."""
    lengths, full = _lengths(view), _full_window(view)
    contributions = view.parts.contributions()
    if full is None or len(set(lengths)) < 2 or contributions is None:
        return ()
    weights = torch.tensor(lengths, dtype=contributions.dtype)[:, None] / full
    shown = ", ".join(map(str, lengths[:6]))
    detail = f"windows of {shown} micro-batches, each divided by {full}"
    return on_every_rank(view, (weights * contributions).mean(0), detail=detail)


def _part_of_full(view: View) -> Sequence[WrongFactor]:
    lengths, full = _lengths(view), _full_window(view)
    if full is None or len(set(lengths)) > 1:
        return ()
    return (WrongFactor(lengths[0] / full, f"{lengths[0]} micro-batches, divided by {full}"),)


def _lengths(view: View) -> tuple[int, ...]:
    """How many micro-batches each rank has gone through; () if that is not known."""
    return tuple(map(len, view.observed.examples_read or ()))


def _full_window(view: View) -> int | None:
    """The number that every micro-batch was divided by, if no window has as many micro-batches.

    A single micro-batch tells nothing: its loss may be divided by anything.
    """
    lengths = _lengths(view)
    if not lengths or max(lengths) < 2:
        return None
    longer = [one for one in _divisors_seen(view) if max(lengths) < one < MOST_MICRO_BATCHES]
    held, length = view.measured.factor or 1.0, sum(lengths) / len(lengths)
    return min(longer, key=lambda full: abs(length / full - held), default=None)


def _divisors_seen(view: View) -> Iterator[int]:
    """The whole numbers that losses before backward, or gradients after it, were divided by."""
    ratio = common_loss_factor(view)
    multiplied = [] if ratio is None or ratio == 1 else [ratio]
    calls = [call for call in view.observed.calls.of(0) if not call.in_backward]
    after = {call.factor for call in calls if call.factor}
    for factor in (*multiplied, *after):
        for divisor in (1 / factor, 1 / (factor * view.world_size)):
            if divisor > 1 and abs(divisor - round(divisor)) < WHOLE * divisor:
                yield round(divisor)


def _shorter_window(view: View) -> Indication | None:
    lengths, full = _lengths(view), _full_window(view)
    numbers_of_ranks = {view.world_size, view.setting.layout.nodes, view.world_size**2}
    if full is None or full / max(lengths) in numbers_of_ranks:
        return None  # the divisor may be the number of ranks instead
    shown = "/".join(map(str, sorted(set(lengths))))
    return Indication(True, f"{shown} micro-batches were read, and divided by {full}")


def _lines_of_short_window(view: View) -> Sequence[PointedLine]:
    calls, full = view.observed.calls, _full_window(view)
    if full is None:
        return ()
    ratio = common_loss_factor(view)
    if ratio is not None and ratio < 1 - WHOLE:
        note = f"ran {max(_lengths(view))} times; each loss is divided by {full}"
        return last_of(calls.backwards, note)
    at_once = full * view.world_size
    note = f"divides by {at_once}: {full} micro-batches on each of {view.world_size} ranks"
    one_by_one = last_of(calls.multiplied_by(1 / full), f"divides by {full}, the full window")
    return one_by_one or last_of(calls.multiplied_by(1 / at_once), note)


def _reduced_early(view: View) -> Iterator[Prediction]:
    """The micro-batches up to the reduction are averaged, and those after it stay local."""
    for gradients in _stacked_micro_batches(view) if where_all_report(view) else ():
        count = gradients.shape[1]
        for end in range(1, count):
            held = gradients[:, :end].sum(1).mean(0) + gradients[:, end:].sum(1)
            yield Prediction(view.on_reporting_ranks(held), f"after micro-batch {end} of {count}")


def _at_another_boundary(view: View) -> Sequence[Prediction]:
    """The reduction came after an earlier micro-batch, or the first or the last one is missing."""
    found = [replace(one, detail=f"reduced {one.detail}") for one in _reduced_early(view)]
    for gradients in _stacked_micro_batches(view):
        count = gradients.shape[1]
        for missing in (0, count - 1) if count > 2 else ():  # Of two, only one would be left.
            held = (gradients.sum(1) - gradients[:, missing]).mean(0)
            detail = f"without micro-batch {missing + 1} of {count}"
            found += on_every_rank(view, held, detail=detail)
    return found


def _stacked_micro_batches(view: View) -> Iterator[Tensor]:
    """All candidates for their gradients, each (world size, micro-batches, elements).

    None unless every rank was seen to call backward for each micro-batch, or for all but one. Where
    nobody watched, only strategies of the suite have several micro-batches, which are known.
    """
    count = view.parts.micro_batches_per_rank
    if count is None or count == 1:
        return
    passes = [len(view.observed.backwards(rank)) for rank in view.observed.by_rank]
    if not all(max(2, count - 1) <= one <= count for one in passes):
        return
    for by_rank in view.micro_batch_gradients:
        if all(len(gradients) == count for gradients in by_rank):
            yield torch.stack([torch.stack(gradients) for gradients in by_rank])


def _synchronised_before(view: View) -> Indication | None:
    """Looks for a last forward pass without synchronisation, after an earlier one with it."""
    flags = [one.synchronised for one in view.observed.wrappers if one.synchronised]
    if flags and all(any(of_wrapper[:-1]) and not of_wrapper[-1] for of_wrapper in flags):
        because = "synchronisation was on in an earlier forward pass, and off in the last one"
        return Indication(True, because)
    return None


def _lines_of_window(view: View) -> Sequence[PointedLine]:
    """Where the window ends too early or loses what was added up, and its last backward."""
    calls, count = view.observed.calls, backward_count(view)
    last = last_of(calls.backwards, f"backward {count} of {count}", is_fault=False)
    cleared = lines_that_clear(view)
    if cleared:
        return in_order(view, *last_of(cleared, "discards what was added up before"), *last)
    for place in by_hand(view):
        late = count - place.first.backwards
        if late > 0:
            note = f"reduces before the last {counted(late, 'backward')} of {count}"
            return in_order(view, place.pointed(note, True), *last)
    note = "DDP does not reduce in the last backward" if view.observed.wrappers else ""
    return lines_without_synchronisation(view, note)


def _last_alone(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' last micro-batches, divided by the number of micro-batches or not."""
    if not _has_windows(view):
        return ()
    parts = view.parts.by_rank or ()
    detail = f"1 of the {max(map(len, parts))} micro-batches of the accumulation window"
    candidates = view.micro_batch_gradients
    last = (torch.stack([one[-1] for one in by_rank]).mean(0) for by_rank in candidates)
    undivided = torch.stack([view.examples.gradient(of_rank[-1]) for of_rank in parts]).mean(0)
    why = "not divided by the number of micro-batches"
    return *on_every_rank(view, *last, detail=detail), *on_every_rank(view, undivided, detail=why)


def _later_stays_local(view: View) -> Sequence[Prediction]:
    """The mean of what was computed before the reduction, plus the rank's own later gradients."""
    reduced = _backwards_reduced(view)
    zero = torch.zeros_like(view.expected)
    early, late = [], []
    for rank, end in enumerate(reduced):
        calls = view.observed.backwards(rank)
        gradients = [zero if call.gradient is None else call.gradient for call in calls]
        if any(len(gradient) != len(zero) for gradient in gradients):
            return ()
        early.append(view.setting.scale * sum(gradients[:end], zero))
        late.append(view.setting.scale * sum(gradients[end:], zero))
    if not reduced:
        return ()
    mean, own, size = torch.stack(early).mean(0), torch.stack(late), view.world_size
    return (
        Prediction(view.on_reporting_ranks(mean + own)),
        Prediction(view.on_reporting_ranks(mean + own / size), f"it is divided by {size} too"),
    )


def _backwards_reduced(view: View) -> tuple[int, ...]:
    """For every rank, how many backwards had run at the last reduction; () if none ran later.

    Also () if the later ones are other micro-batches of the same loop: a boundary is then wrong.
    """
    if not view.observed.covers_every_rank or view.world_size == 1:
        return ()
    reduced = tuple(_reduced_on(view, rank) for rank in range(view.world_size))
    later = [
        rank for rank, end in enumerate(reduced) if 0 < end < len(view.observed.backwards(rank))
    ]
    if not all(reduced) or not later:
        return ()
    if any(one.synchronised and not one.synchronised[-1] for one in view.observed.wrappers):
        return ()  # the later forward pass was told not to synchronise
    is_own = all(_has_its_own_line(view, rank, reduced[rank]) for rank in later)
    if is_own or all(_reads_nothing_new(view, rank, reduced[rank]) for rank in later):
        return reduced
    return ()


def _reduced_on(view: View, rank: int) -> int:
    """How many backwards of this rank had run when gradients were last reduced; 0 if never."""
    last = begun = 0
    for call in view.observed.calls.of(rank):
        begun += call.kind is Kind.BACKWARD
        if reduces_gradients(call):
            last = begun
    if any(any(wrapper.synchronised) for wrapper in view.observed.wrappers):
        for number, backward in enumerate(view.observed.backwards(rank), start=1):
            before, after = backward.issued
            if before is not None and after is not None and after > before:
                last = max(last, number)
    return last


def _has_its_own_line(view: View, rank: int, reduced: int) -> bool:
    """True if the backwards after the reduction stand on other lines than those before it."""
    lines: list[CodeLine | None] = [one.at for one in _backwards(view, rank)]
    if None in lines or len(lines) != len(view.observed.backwards(rank)):
        return False
    return not set(lines[:reduced]) & set(lines[reduced:])


def _backwards(view: View, rank: int) -> list[Call]:
    return [one for one in view.observed.calls.of(rank) if one.kind is Kind.BACKWARD]


def _reads_nothing_new(view: View, rank: int, reduced: int) -> bool:
    """True if the later forward passes read only rows that were read before the reduction."""
    backwards = view.observed.backwards(rank)
    forwards = view.observed.by_rank[rank].forwards
    end = backwards[reduced - 1].forwards
    early = [one.rows for one in forwards[:end] if one.step == view.setting.step]
    late = [one.rows for one in forwards[end : backwards[-1].forwards]]
    if None in early or None in late:
        return False
    read = {row for one in early if one is not None for row in one.candidates}
    return all(read.issuperset(one.candidates) for one in late if one is not None)


def _later_backward(view: View) -> Indication | None:
    reduced = _backwards_reduced(view)
    later = [rank for rank, end in enumerate(reduced) if end < len(view.observed.backwards(rank))]
    who = "every rank" if len(later) == view.world_size else ranks_by_number(later)
    because = f"{who} called backward again after the last reduction of gradients"
    return Indication(True, because) if reduced else None


def _reducing_and_late(view: View) -> tuple[list[CallSite], list[CallSite]]:
    """The lines that reduce, and the lines of the backwards after the last reduction."""
    calls, reduced = view.observed.calls, _backwards_reduced(view)
    of_ranks = [(_backwards(view, rank), end) for rank, end in enumerate(reduced)]
    late = {id(call) for backwards, end in of_ranks for call in backwards[end:]}
    reducing = {id(call) for backwards, end in of_ranks for call in backwards[end - 1 : end]}
    return (
        calls.reductions or calls.places(Kind.BACKWARD, where=lambda call: id(call) in reducing),
        calls.places(Kind.BACKWARD, where=lambda call: id(call) in late),
    )


def _lines_of_later_backward(view: View) -> Sequence[PointedLine]:
    reductions, late = _reducing_and_late(view)
    by_ddp = bool(reductions) and reductions[-1].kind is Kind.BACKWARD
    note = "DDP reduced here" if by_ddp else "gradients are reduced here"
    shown = last_of(reductions, note, is_fault=False)
    added = first_of(late, "afterwards: what it adds stays on its own rank")
    if shown and added:
        return at_meeting(shown[0], added[0], reductions[-1].calls[-1], late[0].first)
    return [*shown, *added]


def _race(view: View) -> Indication | None:
    """Looks at whether the step is repeatable, and at when its collectives were issued."""
    if view.observed.left_other_bits:
        return Indication(True, "the second run of the step left other bits than the first")
    if view.observed.wrappers:
        because = "DistributedDataParallel waits for backward, and a second run left the same bits"
        return Indication(False, because)
    if sharded_names(view):
        because = "fully_shard reduces during backward and waits; a second run left the same bits"
        return Indication(False, because)
    if _only_own_methods_talk(view):
        because = "only backward methods of the step's own exchanged tensors while backward ran"
        return Indication(False, because)
    return indication_if(
        _collectives_ran_inside_backward(view),
        "collectives were issued while backward was running, and not by DistributedDataParallel",
        "no collective was issued while backward was running",
    )


def _only_own_methods_talk(view: View) -> bool:
    """True if all collectives inside backward stand in backward methods of the user's own, which
    send gradients of activations, as tensor parallelism does.
    """
    own = {
        (one.line.file, one.line.function)
        for seen in view.observed.by_rank.values()
        for one in seen.own_backwards
    }
    inside = view.observed.calls.places(Kind.COLLECTIVE, where=lambda call: call.in_backward)
    ways = [(call.at, *call.callers) for place in inside for call in place.calls if call.at]
    return bool(ways) and all(
        any(one is not None and (one.file, one.function) in own for one in way) for way in ways
    )


def _collectives_ran_inside_backward(view: View) -> bool | None:
    """True if every rank issued a collective inside a backward; None if that is not known."""
    inside_by_rank = []
    for observation in view.observed.by_rank.values():
        issued = [call.issued for call in observation.backwards]
        if not issued or any(None in counts for counts in issued):
            return None
        inside_by_rank.append(sum((end or 0) - (begin or 0) for begin, end in issued))
    return all(inside > 0 for inside in inside_by_rank) if inside_by_rank else None


def _lines_of_race(view: View) -> Sequence[PointedLine]:
    """The collective that came too early, and the backward pass that added more."""
    calls = view.observed.calls
    for place in calls.places(Kind.COLLECTIVE, where=lambda call: call.in_backward)[-1:]:
        note = f"{len(place.calls)} calls while backward was running"
        hooks = first_of(calls.places(Kind.TENSOR_HOOK), is_fault=False)
        return [*hooks, place.pointed(note, is_fault=True)]
    last = max((call.backwards for call in calls.of(0)), default=0)
    early = [place for place in calls.reductions if place.first.backwards < last]
    shown = first_of(early, "ran before the last backward")
    return [*shown, *last_of(calls.backwards, is_fault=False)]


def _with_earlier(view: View) -> Sequence[Prediction]:
    """The gradient of the big batch, plus those of the one, two, ... steps before."""
    earlier = view.examples.earlier_expected
    predictions = list(_of_earlier_passes(view))
    for count in range(len(earlier), 0, -1):
        steps = "gradient of the step" if count == 1 else f"gradients of the {count} steps"
        detail = f"the {steps} before {'is' if count == 1 else 'are'} included"
        total = view.expected + torch.stack(earlier[-count:]).sum(0)
        predictions[:0] = on_every_rank(view, total, detail=detail)
    return predictions


def _of_earlier_passes(view: View) -> Sequence[Prediction]:
    """The mean of all that the ranks computed, where each went twice over some of its examples, and
    where the later passes alone would have been right.
    """
    gradients = gradients_by_backward(view) or []
    if view.observed_gradients is None or not passes_of_read_examples(view):
        return ()
    means = [torch.stack(gradients[first:]).sum(0).mean(0) for first in range(len(gradients))]
    is_right = any(nearly_equal(later, view.expected) for later in means[1:])
    if not is_right or nearly_equal(means[0], view.expected):
        return ()
    detail = "a backward over some of the same examples came before"
    return on_every_rank(view, means[0], detail=detail)


def _backward_again(view: View) -> Indication | None:
    """Counts the calls of backward in the first step."""
    if not view.observed.by_rank or view.setting.step > 0:
        return None
    passes = {rank: len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    most = max(passes.values())
    if most == 1:
        return Indication(False, "backward was called once in this step")
    cleared = {name for place in lines_that_clear(view) for name in place.names}
    if cleared >= view.measured.differing:
        return Indication(False, "the gradients that differ were cleared between two passes")
    parts = view.observed.examples_read
    if parts is None:
        parts = view.parts.by_rank if _has_windows(view) else None
    if parts is None:
        return None  # each backward may have been that of another micro-batch
    one_by_one = all(count <= len(parts[rank]) for rank, count in passes.items())
    return indication_if(
        not one_by_one or bool(passes_of_read_examples(view)),
        f"backward was called {most} times in this step",
        "every backward was that of another micro-batch",
    )


def _lines_of_stale(view: View) -> Sequence[PointedLine]:
    """The line after which nothing clears the gradients, and the backward that adds to them."""
    calls, count = view.observed.calls, backward_count(view)
    if view.setting.step > 0 or count <= 1:  # they are of another step
        return first_of(calls.backwards, "adds to gradients that were there already")
    places = calls.backwards
    note = "leaves its gradients" + ("" if lines_that_clear(view) else "; nothing clears them")
    leaves = places[0].pointed(note, True, "zero_grad()")
    adds = places[-1].pointed("adds to them")
    first, last = places[0].first, places[-1].calls[-1]
    met = at_meeting(leaves, adds, first, last)
    if len({one.line for one in met}) == 1:
        return [replace(leaves, note=f"runs {count} times; {note}")]
    return met


NOT_DIVIDED = Hypothesis(
    name="accumulation_not_divided",
    sentence="The losses of the micro-batches were added up, not divided by their number.",
    look_at="the loss before backward: divide it there (loss / accumulation_steps)",
    headline="micro-batch losses are added, not divided",
    tell_apart="Use another number of micro-batches, not a multiple of the number of ranks.",
    held=_added_up,
    multiples=_number_of_micro_batches,
    indication=_losses_divided,
    lines=_lines_that_add_up,
    mend=lambda view: (
        f"divide each loss by {micro_batches_of_a_rank(view)}, the number of micro-batches."
    ),
    of_a_number=True,
    wrong_divisor=True,
)

BY_FULL = Hypothesis(
    name="last_window_divided_by_full",
    sentence="An accumulation window with fewer micro-batches, as at the end of an epoch, was "
    "divided by the number of a full window.",
    look_at="the divisor of the loss in the last window of an epoch: the number of micro-batches "
    "that it has, not accumulation_steps",
    headline="fewer micro-batches than the losses divide by",
    tell_apart="Use a multiple of the full window as the number of micro-batches.",
    held=_divided_by_full,
    multiples=_part_of_full,
    indication=_shorter_window,
    lines=_lines_of_short_window,
    mend=lambda view: (
        f"divide by the number of micro-batches in this window, not by {_full_window(view)}."
    ),
    of_a_number=True,
)

LAST_ALONE = Hypothesis(
    name="only_last_micro_batch",
    sentence="Only the last micro-batch of the accumulation window is in the gradient.",
    look_at="zero_grad inside the loop over micro-batches, or a gradient that is set, not added to",
    headline="only the last micro-batch counts",
    tell_apart=TWO_MICRO_BATCHES,
    held=_last_alone,
    lines=_lines_of_window,
    mend="call backward for all micro-batches, and clear gradients only before the first.",
)

AFTER_REDUCTION = Hypothesis(
    name="backward_after_reduction",
    sentence="Backward was called once more after gradients had been reduced: what it added stays "
    "on its own rank.",
    look_at="a second loss with a backward() of its own: DDP reduces in the first one, and what "
    "is reduced by hand must come after the last one",
    headline="a later backward is not all-reduced",
    tell_apart="Leave the later backward out: only this difference then goes away.",
    applies=where_all_report,
    held=_later_stays_local,
    indication=_later_backward,
    lines=_lines_of_later_backward,
    mend="add the losses and call backward() once, or reduce after the last backward().",
)

BOUNDARY = Hypothesis(
    name="accumulation_boundary_off_by_one",
    sentence="Gradients were reduced after another micro-batch than the last one of the "
    "accumulation window: the gradients of later micro-batches stay on their rank, or are lost.",
    look_at="the condition that leaves no_sync, such as (i + 1) % accumulation_steps == 0, and the "
    "last window of an epoch",
    headline="the reduction misses a micro-batch",
    tell_apart=TWO_MICRO_BATCHES,
    applies=on_several_ranks,  # one rank reduces nothing, so that no boundary can be wrong
    held=_at_another_boundary,
    indication=_synchronised_before,
    lines=_lines_of_window,
    mend="reduce once, after the last micro-batch, and clear gradients nowhere in between.",
)

BEFORE_END = Hypothesis(
    name="reduced_before_backward_finished",
    sentence="Gradients were reduced before backward had finished adding to them.",
    look_at="asynchronous collectives in hooks, streams that are not waited for, and parameters "
    "that get their gradient in several places (tied weights, micro-batches)",
    headline="gradients are reduced before backward ends",
    tell_apart="Run the step again: a race seldom leaves the same bits twice.",
    held=lambda view: (*kept_local_in_part(view), *_reduced_early(view)),
    indication=_race,
    lines=_lines_of_race,
    mend="reduce once after the last backward has returned, and wait for it.",
)

STALE = Hypothesis(
    name="stale_gradient_added",
    sentence="An earlier gradient had not been cleared when the new one was added to it.",
    look_at="zero_grad(): it must run before the backward of every step, also for parameters that "
    "no optimizer holds",
    headline="an earlier gradient was not cleared",
    tell_apart="Take two steps on different examples, with another world size than 2.",
    held=_with_earlier,
    multiples=lambda view: (
        WrongFactor(2.0, "the gradient of an earlier pass over the same examples is included"),
    ),
    indication=_backward_again,
    lines=_lines_of_stale,
    mend="clear the gradients of all parameters (zero_grad) before this backward pass.",
)
