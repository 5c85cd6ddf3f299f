"""Why a difference from one process may show nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from math import isclose

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.observed_scripts.oracle import AT_ONCE, ONE_AFTER_THE_OTHER, CannotReplay
from ddp_equivalence.observed_scripts.queries import STATE
from ddp_equivalence.observed_scripts.record import OWN, Record
from ddp_equivalence.observed_scripts.rows import guessed_paddings
from ddp_equivalence.observed_scripts.script_step import (
    ScriptStep,
    SecondRun,
    are_float64,
    left_over,
)
from ddp_equivalence.report.text import plural

FAITHFUL = 1e-6
"""A rank's own gradient is that of its rows, up to a factor, if no more than this is left over. In
a lower precision this many times as much may be: """
FAITHFUL_IN_LOW_PRECISION = 0.05


def _cannot_replay(why: str) -> Unknown:
    return Unknown(UnknownBecause.CANNOT_REPLAY, why)


def reads_otherwise(step: ScriptStep) -> Unknown | None:
    """Why a difference may lie in the replay: a rank's model was called with other values than in
    one process, which was given the rows of that rank alone.
    """
    for rank in step.ranks:
        try:
            alone = step.alone(rank).read
        except CannotReplay:
            return None
        of_rank = step.recorded[rank].read
        if not of_rank or len(alone) % len(of_rank):
            continue  # the micro-batches are joined
        if alone != of_rank * (len(alone) // len(of_rank)):
            return _cannot_replay(
                f"one process was given the rows of rank {rank} alone, and called its model with "
                "other values than that rank. Either the script changes its rows by rank, or at "
                "random in a way that torch's own generator does not decide"
                + _text_of_held(_held_otherwise(step, rank)),
            )
    return None


def padded_by_guess(step: ScriptStep) -> Unknown | None:
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
    return _cannot_replay(
        f"the ranks have padded their rows to other lengths, and no batch shows with what (in "
        f"{', '.join(paths)}): one process may not have padded them as the script does. Give the "
        "script rows of one length, or batches in which some rows are shorter than others",
    )


def unfaithful(step: ScriptStep, second: SecondRun) -> Unknown | None:
    """Why a difference may lie in the replay: on no rank do its rows alone give, in one process,
    the loss or a multiple of the gradient that the rank itself computed; or a rank for which they
    do not had one of its generators in another state.

    Ranks may differ from that because their losses have something that was reduced, such as a
    count. Then they are faithful if their models returned what they return in one process.
    ``second``: what each rank did.

    At the end of an epoch, one process is told that its epoch has these batches alone. Then the
    loss must be the same, and not only up to a factor, which may be the length of the loader.
    """
    communicates = all(_communicates_before_backward(second, r) for r in second.observations)
    if communicates and _models_return_the_same(step) and _repeats(step):
        return None
    end = step.ends_epoch_early
    losses, failed, repeats = list[str](), "", False
    for rank in step.ranks:
        try:
            answer = step.alone(rank)
        except CannotReplay as error:
            failed = str(error)
            continue
        found, alone = step.computed(answer), sum(answer.losses)
        loss = sum(step.recorded[rank].losses)
        most = FAITHFUL if are_float64(found) else FAITHFUL_IN_LOW_PRECISION
        is_multiple = not end and left_over(step.gradients(rank, OWN), [found]) <= most
        if abs(alone - loss) <= most * abs(loss) or is_multiple:
            repeats = True
            continue
        held = _held_otherwise(step, rank)
        if any(held.values()):
            why = f"rank {rank} may have drawn other numbers than one process{_text_of_held(held)}"
            return _cannot_replay(why)
        loss_text, alone_text = text_of(loss, ".6g"), text_of(alone, ".6g")
        losses.append(f"{loss_text} on rank {rank}, {alone_text} alone")
    if repeats:
        return None  # what some rank computed
    if not losses:
        return _cannot_replay(f"one process cannot compute the rows of one rank alone: {failed}")
    return _cannot_replay(
        "one process does not compute again what a rank computed from the same rows alone (losses: "
        f"{'; '.join(losses)}). Either the script computes something else on several "
        "ranks, or it depends on something that is in no weight, buffer or batch, and is not drawn "
        "from the default random generators of torch"
        + (". It may be the length of the loader, which is another one here" if end else "")
        + _text_of_held(_held_otherwise(step, *step.ranks)),
    )


def _held_otherwise(step: ScriptStep, *ranks: int) -> dict[str, bool]:
    """The values that change from step to step in Python, and were others in one process than on a
    rank: in words, and whether each is the state of a generator.
    """
    found: dict[str, bool] = {}
    for rank in ranks:
        with suppress(CannotReplay):
            alone, held = step.alone(rank).in_python, step.recorded[rank].in_python
            others = [step.record.step(rank, one).in_python for one in step.record.steps]
            found |= {
                f"{name} ({value} on rank {rank}, {alone[name]} here)": value.startswith(STATE)
                for name, value in held.items()
                if value != alone.get(name, value) and any(value != one.get(name) for one in others)
            }
    return found


def _text_of_held(held: Mapping[str, bool]) -> str:
    texts = ", ".join(list(held)[:6])
    return f". These are in another state there: {texts}" if texts else ""


def _communicates_before_backward(second: SecondRun, rank: int) -> bool:
    """A line of the script communicates before the rank goes backward. Calls are seen from the
    first forward pass on, and operations, of small models, from the batch on.
    """
    calls = takewhile(lambda call: call.kind is not Kind.BACKWARD, second.observations[rank].calls)
    if any(call.kind is Kind.COLLECTIVE and call.users_line is not None for call in calls):
        return True
    ran = second.operations[rank].operations if rank in second.operations else ()
    forward = takewhile(lambda one: not one.in_backward, ran)
    return any(one.talks and one.name != "broadcast_" for one in forward)  # DDP sends buffers so


def _repeats(step: ScriptStep) -> bool:
    """The script computes the same losses when it is asked twice."""
    try:
        return step.oracle is not None and step.oracle.repeats(step.group, step.rows)
    except CannotReplay:
        return False


def _models_return_the_same(step: ScriptStep) -> bool:
    """In float64, the modules of each rank return what they return for its rows in one process,
    to the element.
    """
    for rank in step.ranks:
        results = step.recorded[rank].results
        try:
            alone = step.alone(rank)
        except CannotReplay:
            return False
        again, gradients = alone.results, step.computed(alone)
        if not are_float64(gradients) or not results or len(results) != len(again):
            return False
        if not all(isclose(*pair, rel_tol=FAITHFUL) for pair in zip(results, again, strict=True)):
            return False
    return True


def draws_otherwise(step: ScriptStep, order_matters: bool) -> Unknown | None:
    """Why a difference may lie in the random numbers: one process may not draw for each row what
    its rank drew. Then another order of the rows gives it another gradient (``order_matters``).
    """
    oracle = step.oracle
    if oracle is None or not step.draws or not (oracle.missed or order_matters):
        return None
    missed = ", ".join(oracle.missed)
    return _cannot_replay(
        "one process cannot draw for each row the random numbers that its rank drew"
        + (f" ({missed})" if missed else ": the ranks' rows in another order give another gradient")
        + ". Turn off what is random, such as drop path; --no-dropout turns off torch's dropout",
    )


def against_the_names(step: ScriptStep) -> Unknown | None:
    """Nothing can be compared if the optimizer's parameters are in no module that was called."""
    recorded = step.recorded[0]
    if recorded.unnamed and not step.weights():
        return Unknown(
            UnknownBecause.NOTHING_TO_COMPARE,
            f"no parameter of the optimizer ({', '.join(recorded.optimizers)}) is one of a module "
            "that the script calls, as with ZeRO and with FSDP of the first version: their "
            "gradients are not seen",
        )
    return None


# Says that the last step of an epoch was not observed, where it is another one than the rest.
#
# Many scripts are wrong there alone: they divide by a number of micro-batches or rows that this
# step does not have, or leave its reduction out.


def end_is_not_observed(record: Record) -> str:
    """Says what is different at the end of an epoch, and how to look at it; "" if it was observed,
    is like the other steps, or is not known.
    """
    if record.feed != "loader" or not record.steps:
        return ""
    first = record.step(0, record.steps[0])
    batches, last_rows = first.epoch.batches, first.epoch.last_rows
    each = len(record.counts(0, record.groups[0]))
    read = [one for step in record.steps for one in record.step(0, step).used]
    ends = (number + 1 for loader, number in read if loader == first.used[0][0])
    if not batches or any(number % batches == 0 for number in ends):
        return ""
    if left := batches % each:
        what = f"{left} {plural(left, 'micro-batch', 'micro-batches')} instead of {each}"
    elif last_rows:
        rows = first.batches[0].count
        what = f"a batch of {last_rows} {plural(last_rows, 'row')} instead of {rows}"
    else:
        return ""
    before = max(0, (batches - 1) // each - 1) * len(record.groups[0])
    return (
        f"the last step of an epoch, which may have {what}, was not observed: "
        f"--from-step {before} observes it"
    )


def about_epochs(record: Record) -> tuple[str, str]:
    """Returns what ``end_is_not_observed`` says, and how long the loaders of the ranks are, if they
    differ. Each is "" if there is nothing to say.
    """
    lengths = [record.step(rank, 0).epoch.batches for rank in range(record.world_size)]
    each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(lengths))
    apart = (
        f"the loaders of the ranks have different numbers of batches ({each}): at the end of an "
        "epoch, some ranks train without the others, or wait for them for ever"
    )
    return end_is_not_observed(record), apart if len(set(lengths)) > 1 else ""
