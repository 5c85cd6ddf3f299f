"""The last step of an epoch, where it has fewer micro-batches or examples than the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from ddp_equivalence.commands.explain.epochs import Epoch
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.numbers import times
from ddp_equivalence.commands.explain.presets import divisor_of_a_step
from ddp_equivalence.commands.explain.setup import Setup, framework_divisor
from ddp_equivalence.report.wrapping import plural

Share = tuple[int, Fraction]
"""The examples of one loss, and how often each of them counts; on one device it counts once."""


def has_short_last_step(setup: Setup, epoch: Epoch) -> bool:
    """True if the last step has fewer micro-batches or examples than the others."""
    return bool(epoch.rest) or epoch.last_batch != setup.batch


def is_as_on_one_device(explanation: Explanation) -> bool:
    """True if the last step of an epoch is one device's with the same examples in one batch.

    The loop is taken to divide by as many micro-batches as in the other steps, unless a trainer
    does otherwise. Repeated examples are not looked at. True also if no epoch is known.
    """
    epoch = explanation.epoch
    if epoch is None:
        return True
    return _are_one(shares(explanation, epoch, divisor_of_a_step(explanation.setup, epoch.rest)))


def shares(explanation: Explanation, epoch: Epoch, divisor: int) -> tuple[Share, ...]:
    """One for each loss of a process in the last step, with the advice and its learning rate.

    ``divisor``: by what accumulation divides in this step.
    """
    setup = explanation.setup
    if _counts_all(explanation):
        return ((epoch.last_step, Fraction(1)),)
    if not explanation.is_multiple:
        setup = replace(setup, parallelism="data-parallel")  # as the advice says
    batches = [setup.batch] * ((epoch.rest or setup.accumulation) - 1) + [epoch.last_batch]
    known = setup.known_good
    sums = explanation.compares_sums if known is None else known.loss == "sum"
    whole = explanation.effective_batch if sums else epoch.last_step
    should_be = explanation.mended_factor / whole
    found = []
    for batch in batches:
        losses = replace(
            setup, batch=batch, examples=None, drop_last=False, sampler="distributed"
        ).loss_sizes
        for size in losses:
            divided = _divided_by(setup, size, sum(batches), epoch) * len(losses)
            divided *= framework_divisor(setup) * divisor
            weight = setup.loss_times.value(setup.processes) / divided
            found.append((size, weight / should_be))
    return tuple(found)


def _divided_by(setup: Setup, size: int, of_process: int, epoch: Epoch) -> int:
    """By what a loss over ``size`` examples divides, if all have equally many tokens."""
    if setup.loss == "sum":
        return 1
    return {"micro-batch": size, "step": of_process, "all-ranks": epoch.last_step}[
        setup.tokens_over
    ]


def _counts_all(explanation: Explanation) -> bool:
    """True if the advice is to count all tokens of a step, which divides by nothing else."""
    return explanation.setup.loss == "token-mean" and not explanation.is_multiple


def _are_one(found: tuple[Share, ...]) -> bool:
    return all(share == 1 for _, share in found)


def last_step_sentences(explanation: Explanation, epoch: Epoch) -> Iterator[str]:
    """How the gradient of a shorter last step compares with one device's; none if none is."""
    setup, rest, whole = explanation.setup, epoch.rest, explanation.setup.accumulation
    if not has_short_last_step(setup, epoch):
        return
    divides = bool(rest and setup.accumulation_divided and not _counts_all(explanation))
    divisor = divisor_of_a_step(setup, rest)
    found = shares(explanation, epoch, divisor)
    step = "that step" if rest else "the last step"
    if _are_one(found):
        yield f"The gradient of {step} is as it should be{_why(explanation, divisor)}."
    elif len({share for _, share in found}) == 1:
        share = found[0][1]
        size = f"its gradient is {times(share)} {'times ' if share > 1 else ''}as large as it "
        size += "should be"
        if divides and setup.like is not None:
            yield f"The trainer still divides by {whole} in {step}, so {size}."
        elif divides and _are_one(shares(explanation, epoch, rest)):
            yield f"Divide by {rest} in {step}: if you divide by {whole}, {size}."
        else:
            examples = f"{epoch.last_step} {plural(epoch.last_step, 'example')}"
            yield f"{step.capitalize()} has {examples}: {size}."
    else:
        if divides and setup.like is None:
            found, step = shares(explanation, epoch, rest), f"{step} (divided by {rest})"
        counts = " and ".join(
            f"{times(share)} times in a loss over {size}" for size, share in dict.fromkeys(found)
        )
        yield f"In {step} an example counts {counts}; it should count once."
    if epoch.last_batch != setup.batch and not _are_one(found):
        yield from _without_the_last_batch(explanation, epoch)
    if setup.drop_last and rest:
        yield f"One device with drop_last does not take {step.partition(' (')[0]}."


def _without_the_last_batch(explanation: Explanation, epoch: Epoch) -> Iterator[str]:
    """What drop_last does, if a right last step or none is left then."""
    setup = explanation.setup
    left = (epoch.rest or setup.accumulation) - 1
    if not left:
        yield "drop_last leaves the last batch out."
        return
    examples = left * setup.batch * setup.processes
    then = replace(epoch, rest=left, last_batch=setup.batch, last_step=examples)
    if _are_one(shares(explanation, then, divisor_of_a_step(setup, left))):
        yield "drop_last leaves the last batch out."
    elif setup.like is None and _are_one(shares(explanation, then, left)):
        yield f"With drop_last, {left} {plural(left, 'is', 'are')} left to divide by there."


def _why(explanation: Explanation, divisor: int) -> str:
    setup = explanation.setup
    if _counts_all(explanation):
        return ", with the change above"
    if setup.tokens_over != "micro-batch":
        return ": it counts its own tokens"
    if setup.loss == "sum":
        return ": a sum over fewer examples is smaller on one device, too"
    if setup.accumulation_divided and divisor != setup.accumulation:
        return f": the Trainer divides by {divisor} there"
    if setup.accumulation_divided and setup.like is None:
        return f", if you divide by {divisor} there, too"
    return ""
