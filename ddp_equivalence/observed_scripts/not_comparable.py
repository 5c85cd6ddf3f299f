"""Why a difference from one process may show nothing, or is explained by the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from math import isclose
from operator import mul

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes.clipping import BEFORE_REDUCE
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.as_case import (
    BEFORE_CLIP,
    HELD,
    OWN,
    GradientKind,
    ObservedStep,
    distance,
    holds_the_mean_of_own,
    left_over,
    rounding_of,
)
from ddp_equivalence.observed_scripts.looked_at_closer import SecondRun
from ddp_equivalence.observed_scripts.oracle import AT_ONCE, ONE_AFTER_THE_OTHER, CannotReplay
from ddp_equivalence.observed_scripts.query import STATE
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.recorded_step import Place
from ddp_equivalence.observed_scripts.rows import guessed_paddings
from ddp_equivalence.report.text import plural

# Why a difference between the ranks and one process may show nothing.

FAITHFUL = 1e-6
"""A rank's own gradient is that of its rows, up to a factor, if no more than this is left over. In
a lower precision this many times as much may be: """
FAITHFUL_IN_LOW_PRECISION = 0.05


def reads_otherwise(step: ObservedStep) -> Unknown | None:
    """Why a difference may lie in the replay: a rank's model was called with other values than in
    one process, which was given the rows of that rank alone.
    """
    left_out = step.record.left_out(step.group)  # the model was called with those, too
    for rank, rows in enumerate(() if left_out else step.rows_by_rank):
        try:
            alone = step.answer(rows).read
        except CannotReplay:
            return None
        of_rank = step.record.step(rank, step.number).read
        if not of_rank or len(alone) % len(of_rank):
            continue  # the micro-batches are joined
        if alone != of_rank * (len(alone) // len(of_rank)):
            return Unknown(
                UnknownBecause.CANNOT_REPLAY,
                f"one process was given the rows of rank {rank} alone, and called its model with "
                "other values than that rank. Either the script changes its rows by rank, or at "
                "random in a way that torch's own generator does not decide" + _held(step, rank),
            )
    return None


def padded_by_guess(step: ObservedStep) -> Unknown | None:
    """Why a difference may lie in the replay: ranks have padded their rows to other lengths, and
    one process has padded all of them with a value that no batch shows.
    """
    taken = set() if step.oracle is None else step.oracle.arrangements
    if taken and taken <= {ONE_AFTER_THE_OTHER}:
        return None  # then nothing is joined
    read = step.record.read_by_micro_batch(step.group)
    together = [[rows for of_ranks in read for rows in of_ranks]] if AT_ONCE in taken else read
    paths = dict.fromkeys(path for parts in together for path in guessed_paddings(parts))
    if not paths:
        return None
    return Unknown(
        UnknownBecause.CANNOT_REPLAY,
        f"the ranks have padded their rows to other lengths, and no batch shows with what (in "
        f"{', '.join(paths)}): one process may not have padded them as the script does. Give the "
        "script rows of one length, or batches in which some rows are shorter than others",
    )


def unfaithful(step: ObservedStep, seen: SecondRun) -> Unknown | None:
    """Why a difference may lie in the replay: on no rank do its rows alone give, in one process,
    the loss or a multiple of the gradient that the rank itself computed.

    Ranks may differ from that because their losses have something that was reduced, such as a
    count. Then they are faithful if their models returned what they return in one process. ``seen``
    is what each rank did.

    At the end of an epoch, one process is told that its epoch has these batches alone. Then the
    loss must be the same, and not only up to a factor, which may be the length of the loader.
    """
    end = step.record.is_cut_short(step.group)
    communicates = all(_communicates_before_backward(seen, rank) for rank in seen.observations)
    if communicates and _models_return_the_same(step) and _repeats(step):
        return None
    losses, failed = [], ""
    for rank, rows in enumerate(step.rows_by_rank):
        own = step.gradients(rank, OWN)
        try:
            found, losses_alone = step.computed_alone(rows), step.answer(rows).losses
        except CannotReplay as error:
            failed = str(error)
            continue
        recorded = step.record.step(rank, step.number)
        loss, of_rank = sum(losses_alone), sum(recorded.losses)
        in_float64 = all(one.dtype is torch.float64 for one in found.values() if one is not None)
        most = FAITHFUL if in_float64 else FAITHFUL_IN_LOW_PRECISION
        if abs(loss - of_rank) <= most * abs(of_rank):
            return None
        if not end and left_over(own, [found]) <= most:
            return None
        losses.append(f"{text_of(of_rank, '.6g')} on rank {rank}, {text_of(loss, '.6g')} alone")
    if not losses:
        why = f"one process cannot compute the rows of one rank alone: {failed}"
        return Unknown(UnknownBecause.CANNOT_REPLAY, why)
    return Unknown(
        UnknownBecause.CANNOT_REPLAY,
        "one process does not compute again what a rank computed from the same rows alone (losses: "
        f"{'; '.join(losses)}). Either the script computes something else on several ranks, or it "
        "depends on something that is in no weight, buffer or batch, and is not drawn from the "
        "default random generators of torch"
        + (". It may be the length of the loader, which is another one here" if end else "")
        + _held(step, *range(step.record.world_size)),
    )


def _held(step: ObservedStep, *ranks: int) -> str:
    """What changes from step to step in Python, and was another value here than on a rank."""
    texts = []
    for rank in ranks:
        with suppress(CannotReplay):
            alone = step.answer(step.rows_by_rank[rank]).in_python
            held = step.record.step(rank, step.number).in_python
            others = [step.record.step(rank, one).in_python for one in step.record.steps]
            names = [
                name
                for name in held
                if held[name] != alone.get(name, held[name])
                and any(held[name] != one.get(name) for one in others)
            ]
            texts += [f"{one} ({held[one]} on rank {rank}, {alone[one]} here)" for one in names]
    return f". These are in another state there: {', '.join(texts[:6])}" if texts else ""


def _communicates_before_backward(seen: SecondRun, rank: int) -> bool:
    """A line of the script communicates before the rank goes backward. Calls are seen from the
    first forward pass on, and operations, of small models, from the batch on.
    """
    calls = takewhile(lambda call: call.kind is not Kind.BACKWARD, seen.observations[rank].calls)
    if any(call.kind is Kind.COLLECTIVE and call.users_line is not None for call in calls):
        return True
    ran = seen.operations[rank].operations if rank in seen.operations else ()
    forward = takewhile(lambda one: not one.in_backward, ran)
    return any(one.talks and one.name != "broadcast_" for one in forward)  # DDP sends buffers so


def _repeats(step: ObservedStep) -> bool:
    """The script computes the same losses when it is asked twice."""
    try:
        return step.oracle is not None and step.oracle.repeats(step.group, step.rows)
    except CannotReplay:
        return False


def _models_return_the_same(step: ObservedStep) -> bool:
    """In float64, the modules of each rank return what they return for its rows in one process,
    to the element.
    """
    for rank, rows in enumerate(step.rows_by_rank):
        results = step.record.step(rank, step.number).results
        try:
            again, gradients = step.answer(rows).results, step.computed_alone(rows).values()
        except CannotReplay:
            return False
        in_float64 = all(one is None or one.dtype is torch.float64 for one in gradients)
        if not in_float64 or not results or len(results) != len(again):
            return False
        if not all(isclose(*pair, rel_tol=FAITHFUL) for pair in zip(results, again, strict=True)):
            return False
    return True


def draws_by_rank(step: ObservedStep) -> Unknown | None:
    """Why a difference may lie in a generator of the script: a rank, which draws from it, had it in
    another state than one process, and computes another loss than its rows give there.
    """
    for rank, rows in enumerate(step.rows_by_rank):
        with suppress(CannotReplay):
            own, alone = step.record.step(rank, step.number), step.answer(rows)
            held = _held(step, rank)
            if f"({STATE}" in held and not isclose(
                sum(own.losses), sum(alone.losses), rel_tol=FAITHFUL
            ):
                why = f"rank {rank} may have drawn other numbers than one process{held}"
                return Unknown(UnknownBecause.CANNOT_REPLAY, why)
    return None


def draws_otherwise(step: ObservedStep, analysis: AnalysisOfScript) -> Unknown | None:
    """Why a difference may lie in the random numbers: one process may not draw for each row what
    its rank drew. Then another order of the rows gives it another gradient.
    """
    oracle, ranks = step.oracle, range(step.record.world_size)
    if oracle is None or not any(step.record.step(r, step.number).draws for r in ranks):
        return None
    if not (oracle.missed or analysis.order_matters):
        return None
    missed = ", ".join(oracle.missed)
    return Unknown(
        UnknownBecause.CANNOT_REPLAY,
        "one process cannot draw for each row the random numbers that its rank drew"
        + (f" ({missed})" if missed else ": the ranks' rows in another order give another gradient")
        + ". Turn off what is random, such as drop path; --no-dropout turns off torch's dropout",
    )


def against_an_idle_plant(step: ObservedStep) -> Unknown | None:
    """Nothing is shown if a planted fault never did its damage."""
    ranks = range(step.record.world_size)
    fired = [step.record.step(rank, step.number).planted for rank in ranks]
    if any(count is None or count > 0 for count in fired):
        return None
    return Unknown(
        UnknownBecause.PLANTED_FAULT_NEVER_FIRED,
        "a fault was planted, but the script never reached the place where it does its damage",
    )


def against_the_names(step: ObservedStep) -> Unknown | None:
    """Nothing can be compared if the optimizer's parameters are in no module that was called."""
    recorded = step.record.step(0, step.number)
    if recorded.unnamed and not step.weights():
        return Unknown(
            UnknownBecause.NOTHING_TO_COMPARE,
            f"no parameter of the optimizer ({', '.join(recorded.optimizers)}) is one of a module "
            "that the script calls, as with ZeRO and with FSDP of the first version: their "
            "gradients are not seen",
        )
    return None


# Tells that a script's loss depends on rows together, where ranks and reduction are right.
#
# Then no average over ranks is the gradient of one process: negatives of a contrastive loss, a
# ratio of norms, a statistic of the batch.

NAME = "statistic_not_additive"

CERTAIN = 5
"""So many times the rounding must the big batch's gradient leave unexplained."""


def rows_depend_on_each_other(step: ObservedStep, view: View | None) -> Iterator[Finding]:
    """The finding, if every rank computes what its rows give alone, the ranks hold the mean of
    that, and the gradient of all rows is no mixture of these gradients. ``view``: of the step.
    """
    if any(step.record.step(rank, step.number).batch_norm for rank in _ranks(step)):
        return
    try:
        alone = [step.computed_alone(step.rows_by_rank[rank]) for rank in _ranks(step)]
        together = step.computed_alone(step.everything)
        is_additive = is_loss_additive(step)
    except CannotReplay:
        return
    most = rounding_of(together)
    own = [step.gradients(rank, OWN) for rank in _ranks(step)]
    if any(
        distance([(1.0, mine), (-1.0, its)]) > most for mine, its in zip(own, alone, strict=True)
    ):
        return
    if not holds_the_mean_of_own(step):
        return
    left = left_over(together, alone)
    if left <= CERTAIN * most or is_additive:
        return
    yield Finding(
        cause=NAME,
        sentence="The loss depends on the rows of a batch together, as with negatives, a ratio of "
        "norms or a statistic of the batch, and every rank has only its own rows. The ranks "
        "compute and average rightly; no average over ranks is the gradient of one process",
        look_at="what the loss compares or divides by: gather it from all ranks, with its gradient",
        accepted=True,
        headline="the loss depends on rows together, and a rank has only its own",
        because="each rank computes what its rows give alone, and their average is right, but "
        f"{text_of(left, '.2g')} of the big batch's gradient is no mixture of these",
        fix="none, if that is meant; else gather from all ranks what the loss compares.",
        lines=_line_of_coupled_loss(step, view),
    )


def is_loss_additive(step: ObservedStep) -> bool:
    """True if the loss of all rows is the mean of the ranks' losses, by their numbers of rows.

    Raises CannotReplay.
    """
    rows = [step.rows_by_rank[rank] for rank in _ranks(step)]
    of_ranks = [sum(step.answer(of_rank).losses) for of_rank in rows]
    counts = [len(of_rank) for of_rank in rows]
    mean = sum(map(mul, of_ranks, counts)) / sum(counts)
    loss = sum(step.answer(step.everything).losses)
    return bool(abs(loss - mean) <= NEGLIGIBLE * abs(mean))


def _line_of_coupled_loss(step: ObservedStep, view: View | None) -> tuple[PointedLine, ...]:
    """The line that made the loss; if that is not known, the one that called backward."""
    note = "the loss of this rank's rows alone"
    made = line_of_loss(view, note, is_fault=True) if view is not None else None
    recorded = step.record.step(0, step.number)
    place = recorded.backward_at[-1] if recorded.backward_at else Place()
    if made is not None or not place.file:
        return (made,) if made is not None else ()
    line = CodeLine(place.file, place.number, place.function)
    return (PointedLine(line, f"begins at {note}", is_fault=True),)


def _ranks(step: ObservedStep) -> range:
    return range(step.record.world_size)


# Tells that hooks limit each rank's own gradient on its way to the reduction.
#
# Then the ranks average rightly what is no part of the big batch's gradient any more.

Gradients = Mapping[str, Tensor | None]


def limited_by_hooks(step: ObservedStep, view: View | None) -> Iterator[Finding]:
    """The finding, if hooks of parameters were seen, many elements of each rank's own gradient have
    the same, largest size, and the others are what the rank's rows give. ``view``: of the step.
    """
    hooks = [] if view is None else view.observed.calls.places(Kind.TENSOR_HOOK)
    hooks = [place for place in hooks if any(call.names for call in place.calls)]
    ranks = range(step.record.world_size)
    if not hooks or not all(_is_any_limited(step, rank) for rank in ranks):
        return
    own = [step.gradients(rank, OWN) for rank in ranks]
    try:
        alone = [step.computed_alone(step.rows_by_rank[rank]) for rank in ranks]
        together = step.computed_alone(step.everything)
        if not is_loss_additive(step):
            return  # then the mean of the ranks' own gradients is another one without any hook
    except CannotReplay:
        return
    most = rounding_of(together)
    if not holds_the_mean_of_own(step):
        return
    if not all(_others_are_right(step, rank, alone[rank], most) for rank in ranks):
        return
    left = left_over(together, own)
    if left <= CERTAIN * most:
        return
    yield Finding(
        cause=BEFORE_REDUCE.name,
        sentence="Hooks limit the elements of each rank's own gradient before the average",
        look_at="Tensor.register_hook: a hook of a parameter runs before DDP reduces its gradient",
        accepted=True,
        headline="hooks clip each rank's gradient before the reduction",
        because="many elements of a rank's own gradient have the same, largest size; "
        f"{text_of(left, '.2g')} of the big batch's gradient is no mixture of the ranks' own",
        fix="clip after the gradients of all ranks are reduced, before the optimizer steps.",
        lines=_lines_of_limiting_hooks(step, hooks),
    )


def _lines_of_limiting_hooks(
    step: ObservedStep, hooks: Sequence[CallSite]
) -> tuple[PointedLine, ...]:
    """The lines that register hooks of the parameters whose gradients are limited."""
    limited = {
        name
        for rank in range(step.record.world_size)
        for of_pass in _passes(step, rank)
        for name in of_pass
        if _limits({name: of_pass[name]})
    }
    note = "the hook changes this rank's own gradient"
    on_these = [
        place for place in hooks if any(limited.intersection(call.names) for call in place.calls)
    ]
    return tuple(place.pointed(note, is_fault=len(on_these) == 1) for place in on_these)


def _passes(step: ObservedStep, rank: int) -> Sequence[Gradients]:
    """The rank's own gradients of each backward pass."""
    reader = step.record.reader(rank, step.number)
    count = len(reader.step.losses)
    found = [reader.below(f"own_of_{number}/") for number in range(count)] if count > 1 else []
    return [{step.short(name): one for name, one in of_pass.items()} for of_pass in found] or [
        step.gradients(rank, OWN)
    ]


def _is_any_limited(step: ObservedStep, rank: int) -> bool:
    return any(_limits(of_pass) for of_pass in _passes(step, rank))


def _limits(gradients: Gradients) -> set[float]:
    """The sizes that more elements of a parameter's gradient have than by chance, and that none of
    its elements exceeds.
    """
    found = set()
    for gradient in gradients.values():
        if gradient is None or not gradient.any():
            continue
        sizes = gradient.abs()
        largest = sizes.max()
        if int((sizes == largest).sum()) > 1 + gradient.numel() // 1000:
            found.add(float(largest))
    return found


def _others_are_right(step: ObservedStep, rank: int, alone: Gradients, most: float) -> bool:
    """True if the elements that no hook limited in any pass are those that the rows give alone."""
    own, passes = step.gradients(rank, OWN), _passes(step, rank)
    limits = [torch.tensor(sorted(_limits(of_pass)), dtype=torch.float64) for of_pass in passes]
    off = of_all = 0.0
    for name, gradient in own.items():
        its = alone.get(name)
        if gradient is None or its is None:
            continue
        free = torch.ones_like(gradient, dtype=torch.bool)
        for of_pass, limits_of_pass in zip(passes, limits, strict=True):
            one = of_pass.get(name)
            if one is not None:
                free &= ~torch.isin(one.abs().double(), limits_of_pass)
        off += float((gradient.double() - its.double())[free].square().sum())
        of_all += float(its.double().square().sum())
    return of_all > 0 and (off / of_all) ** 0.5 <= most


# Scripts that clip each rank's own gradient, and reduce afterwards.
#
# Before the clip nothing is reduced yet: what counts is then the gradient that the optimizer
# gets.


def reduces_after_clipping(step: ObservedStep) -> bool:
    """True if every rank clips what it alone has computed, and all step with the same gradient."""
    ranks = range(step.record.world_size)
    if len(ranks) < 2 or not all(step.record.step(rank, step.number).clips for rank in ranks):
        return False
    if not all(_is_equal(step, (rank, BEFORE_CLIP), (rank, OWN)) for rank in ranks):
        return False
    others = ranks[1:]
    if all(_is_equal(step, (0, OWN), (rank, OWN)) for rank in others):
        return False  # then it cannot be told whether they are reduced
    return all(_is_equal(step, (0, HELD), (rank, HELD)) for rank in others)


def _is_equal(
    step: ObservedStep, one: tuple[int, GradientKind], other: tuple[int, GradientKind]
) -> bool:
    first, second = step.gradients(*one), step.gradients(*other)
    return distance([(1.0, first), (-1.0, second)]) <= rounding_of(first)


# Says that the last step of an epoch was not observed, where it is another one than the rest.
#
# Many scripts are wrong there alone: they divide by a number of micro-batches or rows that this
# step does not have, or leave its reduction out.


def end_is_not_observed(record: Record) -> str:
    """What is different at the end of an epoch, and how to look at it; "" if it was observed, is
    like the other steps, or is not known.
    """
    if record.feed != "loader" or not record.steps:
        return ""
    first = record.step(0, record.steps[0])
    loader = first.batches[0][0]
    batches, last_rows = first.epoch.batches, first.epoch.last_rows
    each = len(record.counts(0, record.groups[0]))
    numbers = {
        number
        for step in record.steps
        for of, number in record.step(0, step).batches
        if of == loader
    }
    left = batches % each
    if not batches or any((number + 1) % batches == 0 for number in numbers):
        return ""
    if not left and not last_rows:
        return ""
    what = (
        f"{left} {plural(left, 'micro-batch', 'micro-batches')} instead of {each}"
        if left
        else f"a batch of {last_rows} {plural(last_rows, 'row')} instead of {first.batch_counts[0]}"
    )
    before = max(0, (batches - 1) // each - 1) * len(record.groups[0])
    return (
        f"the last step of an epoch, which may have {what}, was not observed: "
        f"--from-step {before} observes it"
    )


def about_epochs(record: Record) -> tuple[str, str]:
    """What ``end_is_not_observed`` says, and how long the loaders of the ranks are, if they differ.
    Each is "" if there is nothing to say.
    """
    lengths = [record.step(rank, 0).epoch.batches for rank in range(record.world_size)]
    each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(lengths))
    apart = (
        f"the loaders of the ranks have different numbers of batches ({each}): at the end of an "
        "epoch, some ranks train without the others, or wait for them for ever"
    )
    return end_is_not_observed(record), apart if len(set(lengths)) > 1 else ""
