"""The last step of an epoch, where it has fewer micro-batches or examples than the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from ddp_equivalence.commands.explain.explanation import (
    Epoch,
    Explanation,
    Setup,
    framework_divisor,
    times,
)
from ddp_equivalence.commands.explain.presets import divisor_of_a_step
from ddp_equivalence.report.text import plural


@dataclass(frozen=True)
class Share:
    """Losses of a process in the last step that all see as many examples.

    ``losses``: how many losses. ``size``: the examples of each. ``counts``: how often each example
    counts in the gradient; on one device it counts once.
    """

    losses: int
    size: int
    counts: Fraction


def is_as_on_one_device(explanation: Explanation) -> bool:
    """True if the last step of an epoch is one device's with the same examples in one batch.

    The loop is taken to divide by as many micro-batches as in the other steps, unless a trainer
    does otherwise. Repeated examples are not looked at. True also if no epoch is known.
    """
    epoch = explanation.epoch
    if epoch is None:
        return True
    return _are_once(shares(explanation, epoch, divisor_of_a_step(explanation.setup, epoch.rest)))


def shares(explanation: Explanation, epoch: Epoch, divisor: int) -> list[Share]:
    """How often examples count in the last step, with the advice and its learning rate.

    ``divisor``: by what accumulation divides in this step.
    """
    setup = explanation.setup
    if _counts_all_tokens(explanation):
        return [Share(1, epoch.last_step, Fraction(1))]
    if not explanation.is_multiple:
        setup = replace(setup, parallelism="data-parallel")  # as the advice says
    full = (epoch.rest or setup.accumulation) - 1
    of_process = full * setup.batch + epoch.last_batch
    known = setup.known_good
    sums = explanation.compares_sums if known is None else known.loss == "sum"
    should_be = explanation.mended_factor / (
        explanation.effective_batch if sums else epoch.last_step
    )
    found = []
    for batches, batch in ((full, setup.batch), (1, epoch.last_batch)):
        sizes = _loss_sizes(setup, batch) if batches else ()
        for size in dict.fromkeys(sizes):
            divided = _divided_by(setup, size, of_process, epoch) * len(sizes)
            weight = setup.loss_times.value(setup.processes) / (
                divided * framework_divisor(setup) * divisor
            )
            found.append(Share(batches * sizes.count(size), size, weight / should_be))
    return found


def _loss_sizes(setup: Setup, batch: int) -> tuple[int, ...]:
    without_epoch = replace(setup, examples=None, drop_last=False, sampler="distributed")
    return replace(without_epoch, batch=batch).loss_sizes


def _divided_by(setup: Setup, size: int, of_process: int, epoch: Epoch) -> int:
    """By what a loss over ``size`` examples divides, if all have equally many tokens."""
    if setup.loss == "sum":
        return 1
    return {"micro-batch": size, "step": of_process, "all-ranks": epoch.last_step}[
        setup.tokens_over
    ]


def _counts_all_tokens(explanation: Explanation) -> bool:
    """True if the advice is to count all tokens of a step, which divides by nothing else."""
    return explanation.setup.loss == "token-mean" and not explanation.is_multiple


def _are_once(found: list[Share]) -> bool:
    return all(share.counts == 1 for share in found)


def last_step_sentences(explanation: Explanation, epoch: Epoch) -> Iterator[str]:
    """How the gradient of a shorter last step compares with one device's; none if none is."""
    setup = explanation.setup
    if not epoch.rest and epoch.last_batch == setup.batch:
        return
    divisor = divisor_of_a_step(setup, epoch.rest)
    found = shares(explanation, epoch, divisor)
    step = "that step" if epoch.rest else "the last step"
    if _are_once(found):
        yield f"The gradient of {step} is as it should be{_why(explanation, divisor)}."
    else:
        says = _not_as_it_should_be(explanation, epoch, found, step)
        yield says if explanation.is_multiple else f"With the change above: {says}"
        if epoch.last_batch != setup.batch:
            yield from _without_the_last_batch(explanation, epoch)
    if setup.drop_last and epoch.rest:
        yield f"One device with drop_last does not take {step}."


def _not_as_it_should_be(
    explanation: Explanation, epoch: Epoch, found: list[Share], step: str
) -> str:
    setup, rest, whole = explanation.setup, epoch.rest, explanation.setup.accumulation
    divides = bool(rest and setup.accumulation_divided)
    if len({share.counts for share in found}) > 1:
        if divides and setup.like is None:
            found, step = shares(explanation, epoch, rest), f"{step} (divided by {rest})"
        counts = " and ".join(
            f"{_often(share.counts)} in a loss over {share.size}"
            for share in {(share.size, share.counts): share for share in found}.values()
        )
        return f"In {step} an example counts {counts}; it should count once."
    by = found[0].counts
    size = f"its gradient is {times(by)} {'times ' if by > 1 else ''}as large as it should be"
    if divides and setup.like is not None:
        own = divisor_of_a_step(setup, rest)
        how = (
            f"divides by {rest}, and not by {whole}," if own == rest else f"still divides by {own}"
        )
        return f"The trainer {how} in {step}, so {size}."
    if divides and _are_once(shares(explanation, epoch, rest)):
        return f"Divide by {rest} in {step}: if you divide by {whole}, {size}."
    examples = f"{epoch.last_step} {plural(epoch.last_step, 'example')}"
    return f"{step.capitalize()} has {examples}: {size}."


def _often(counts: Fraction) -> str:
    return "once" if counts == 1 else f"{times(counts)} times"


def _without_the_last_batch(explanation: Explanation, epoch: Epoch) -> Iterator[str]:
    """What drop_last does, if a right last step or none is left then."""
    setup = explanation.setup
    left = (epoch.rest or setup.accumulation) - 1
    if not left:
        if epoch.full_steps > (epoch.rest == 0):  # else no step is left
            yield "drop_last leaves the last batch out."
        return
    examples = left * setup.batch * setup.processes
    then = replace(epoch, rest=left, last_batch=setup.batch, last_step=examples)
    if _are_once(shares(explanation, then, divisor_of_a_step(setup, left))):
        yield "drop_last leaves the last batch out."
    elif setup.like is None and _are_once(shares(explanation, then, left)):
        yield f"With drop_last, {left} {plural(left, 'is', 'are')} left to divide by there."


def _why(explanation: Explanation, divisor: int) -> str:
    setup, epoch = explanation.setup, explanation.epoch
    but = ", apart from the repeated examples" if epoch is not None and epoch.repeated else ""
    if not explanation.is_multiple:
        return f", with the change above{but}"
    if setup.tokens_over != "micro-batch":
        return f"{but}: it counts its own tokens"
    if setup.accumulation_divided and setup.like is None:
        but = f"{but}, if you divide by {divisor} there, too"
    if setup.loss == "sum":
        return f"{but}: a sum over fewer examples is smaller on one device, too"
    if setup.accumulation_divided and divisor != setup.accumulation:
        return f"{but}: the Trainer divides by {divisor} there"
    return but
