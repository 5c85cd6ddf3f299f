"""Why a difference between the ranks and one process may show nothing."""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile
from math import isclose

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.arrangements import AT_ONCE, ONE_AFTER_THE_OTHER
from ddp_equivalence.observed_scripts.as_case import OWN, ObservedStep
from ddp_equivalence.observed_scripts.gradient_sums import left_over
from ddp_equivalence.observed_scripts.looked_at_closer import SecondRun
from ddp_equivalence.observed_scripts.query import STATE
from ddp_equivalence.observed_scripts.rows import guessed_paddings
from ddp_equivalence.observed_scripts.running_script import CannotReplay

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
