"""The gradient that a setup leaves on every rank, as a multiple of the big batch's."""

from __future__ import annotations

from fractions import Fraction

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.explain.explanation import (
    UNCHANGED,
    Divisor,
    Explanation,
    LossFactor,
    Setup,
    epoch_of,
    framework_divisor,
    learning_rates_of,
    times,
    token_counts,
)
from ddp_equivalence.commands.explain.text import explanation_text
from ddp_equivalence.report.text import plural


def _require_setup(given: object) -> None:
    if not isinstance(given, Setup):
        raise BadCase("setup", given, "a Setup, such as Setup(batch=4)")


def explain(setup: Setup) -> Explanation:
    """Work out what the setup computes.

    Raises BadCase for anything but a Setup. One that cannot be right is refused when it is made.
    """
    _require_setup(setup)
    weights = example_weights(setup)
    batch = setup.effective_batch
    factor = batch * sum(
        (size * weight for size, weight in zip(setup.loss_sizes, weights, strict=True)), Fraction(0)
    )
    factor /= setup.batch
    uneven = len(set(weights)) > 1
    counted_apart = setup.loss == "token-mean" and token_counts(setup) > 1
    is_multiple = not uneven and not counted_apart
    # The advice for tokens replaces every divisor by one count of all tokens. The advice for uneven
    # replicas leaves the other divisors as they are.
    mended = factor if is_multiple or setup.loss != "token-mean" else Fraction(1)
    return Explanation(
        setup=setup,
        effective_batch=batch,
        divisors=_divisors(setup),
        factor=factor,
        is_multiple=is_multiple,
        mended_factor=mended,
        shares=tuple(
            (size, batch * weight) for size, weight in zip(setup.loss_sizes, weights, strict=True)
        )
        if uneven
        else (),
        learning_rates=learning_rates_of(setup, mended),
        epoch=epoch_of(setup),
        render=explanation_text,
    )


def example_weights(setup: Setup) -> list[Fraction]:
    """The factor on an example's own gradient, for each loss of one micro-batch.

    A mean over tokens is treated as if every example had as many tokens.
    """
    accumulated = setup.accumulation if setup.accumulation_divided else 1
    after = Fraction(len(setup.loss_sizes) * accumulated * framework_divisor(setup))
    after /= setup.loss_times.value(setup.processes)
    of_step = setup.batch * setup.accumulation
    if setup.tokens_over == "all-ranks":
        of_step *= setup.processes
    by_loss = [
        1 if setup.loss == "sum" else size if setup.tokens_over == "micro-batch" else of_step
        for size in setup.loss_sizes
    ]
    return [1 / (divided * after) for divided in by_loss]


def _divisors(setup: Setup) -> tuple[Divisor, ...]:
    divisors = [_divisor_of_loss(setup)]
    losses, factor = len(setup.loss_sizes), setup.loss_times
    if factor != UNCHANGED:
        times_it = factor.value(setup.processes)
        why = " (the world size)" if factor == LossFactor(power=1) else ""
        divisors.append(Divisor(f"it is multiplied by {times(times_it)}{why}", 1 / times_it))
    if setup.parallelism == "data-parallel-loss-inside":
        divisors.append(Divisor(f"the mean over the replicas' losses divides by {losses}", losses))
    if setup.accumulation > 1:
        number = setup.accumulation if setup.accumulation_divided else 1
        how = f"divides by {number}" if setup.accumulation_divided else "does not divide"
        divisors.append(Divisor(f"accumulation {how}", number))
    if setup.processes > 1:
        number = framework_divisor(setup)
        averaged = f"DDP's average divides by {number}"
        what = "your own all_reduce does not divide" if number == 1 else averaged
        divisors.append(Divisor(what, number))
    return tuple(divisors)


def _divisor_of_loss(setup: Setup) -> Divisor:
    whose, sizes = _whose(setup), setup.loss_sizes
    if setup.loss == "token-mean":
        tokens = {
            "micro-batch": "its own tokens",
            "step": "the tokens of all its micro-batches",
            "all-ranks": "all tokens of the step",
        }[setup.tokens_over]
        loss = "mean" if setup.tokens_over == "micro-batch" else "summed"
        return Divisor(f"{whose} {loss} loss divides by the number of {tokens}", None)
    if setup.loss == "sum":
        return Divisor(f"{whose} summed loss does not divide", 1)
    if len(set(sizes)) > 1:
        counts = " or ".join(str(size) for size in sorted(set(sizes), reverse=True))
        return Divisor(f"{whose} mean loss divides by its {counts} examples", None)
    examples = f"{sizes[0]} {plural(sizes[0], 'example')}"
    return Divisor(f"{whose} mean loss divides by its {examples}", sizes[0])


def _whose(setup: Setup) -> str:
    if setup.parallelism == "data-parallel-loss-inside":
        return "each replica's"
    if setup.parallelism == "hybrid" and setup.processes > 1:
        return "each process's"
    return "each rank's" if setup.processes > 1 else "the"
