"""What is said of learning rates: what each one keeps. Which of it matters is the reader's."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.explain.arithmetic import Explanation
from ddp_equivalence.explain.learning_rates import LearningRates
from ddp_equivalence.explain.numbers import number, times
from ddp_equivalence.explain.setup import KnownGood


def rate_sentences(explanation: Explanation) -> Iterator[str]:
    """Sentences on the learning rate; on how to divide it where none is known to be good."""
    rates, known = explanation.learning_rates, explanation.setup.known_good
    if rates is None or known is None:
        yield from _without_known(explanation)
        return
    if rates.scaling == 1:
        yield from _at_the_same_batch(explanation, rates, known)
        return
    loss = ", with a summed loss," if known.loss == "sum" else ""
    yield (
        f"{number(known.learning_rate)} worked{loss} with batch {known.batch}; "
        f"{explanation.effective_batch} is {times(rates.scaling)} times that. No learning rate "
        "trains the same then. What each one keeps:"
    )
    if explanation.setup.optimizer == "adam":
        yield from _for_adam(rates)
        return
    if rates.relative != 1:
        kind = "the sum's" if known.loss == "sum" else "the mean's"
        yield (
            f"(Each is divided by {times(rates.relative)}, which your gradient is of {kind} over "
            "the known batch.)"
            if known.loss == "sum"
            else f"(Your gradient's factor, {times(rates.relative)}, is divided out of each.)"
        )
    yield from _for_sgd(rates)


def _without_known(explanation: Explanation) -> Iterator[str]:
    batch, factor = explanation.effective_batch, explanation.factor
    rate = f"the one that works with a mean loss and batch {batch} on one device"
    if explanation.setup.optimizer == "adam":
        yield f"{rate}; Adam cancels a constant factor."
    elif factor == 1:
        yield f"{rate}, unchanged."
    else:
        yield f"{rate}, divided by {times(factor)}."
    yield "--known-good BATCH@LR works it out from one that you know."


def _at_the_same_batch(
    explanation: Explanation, rates: LearningRates, known: KnownGood
) -> Iterator[str]:
    was, now = number(known.learning_rate), number(rates.same_step)
    if explanation.setup.optimizer == "adam":
        yield f"{now}, as on one device: Adam cancels a constant factor of the gradient."
    elif not explanation.is_multiple:
        yield (
            f"{was} after that, as on one device. Before it none trains the same; {now} makes "
            "updates as long as they were on average."
        )
    elif rates.relative == 1:
        ranks = explanation.setup.processes
        more = f" It is not to be multiplied by {ranks}, nor by its root." if ranks > 1 else ""
        yield f"{now}, as on one device: every update is the same.{more}"
    else:
        yield (
            f"{was} / {times(rates.relative)} = {now}: every update is then the same as on one "
            "device."
        )
        yield (
            f"Or multiply the loss by {times(1 / rates.relative)} and keep {was}: then weight "
            "decay and clipping are right as well."
        )


def _for_sgd(rates: LearningRates) -> Iterator[str]:
    assert rates.linear is not None
    k = times(rates.scaling)
    yield f"{number(rates.same_step)} keeps the length of a step for the same mean gradient."
    yield (
        f"{number(rates.linear)} (linear, x {k}) keeps the update per example: one step moves as "
        f"far as {_steps(rates)} if the gradient hardly changes in between. "
        "(Goyal et al. 2017, arXiv 1706.02677, section 2.1. They find that it fails while the "
        "weights change fast, and so warm up to it over the first epochs; and that it fails "
        "beyond some batch size.)"
    )
    yield (
        f"{number(rates.square_root)} (square root, x {times_root(rates)}) keeps the variance of "
        "the update that comes from drawing examples. (Krizhevsky 2014, arXiv 1404.5997, who "
        "found linear scaling to work better; Hoffer et al. 2017, arXiv 1705.08741.)"
    )


def _for_adam(rates: LearningRates) -> Iterator[str]:
    assert rates.adam is not None
    yield (
        f"{number(rates.same_step)} keeps the length of a step: Adam divides the gradient by its "
        "own size, whatever the batch."
    )
    if rates.adam.betas is None:
        settings = (
            f"its betas, 1 - {times(rates.scaling)} x (1 - beta), would not stay above 0 from "
            "torch's defaults: the rule does not reach so far"
        )
    else:
        betas = ", ".join(number(beta) for beta in rates.adam.betas)
        settings = f"betas ({betas}) and eps {number(rates.adam.eps)}, from torch's defaults"
    yield (
        f"{number(rates.square_root)} (square root, x {times_root(rates)}) keeps the path and "
        f"its noise where noise is most of the gradient, together with {settings}. "
        "(Malladi et al. 2022, arXiv 2205.10287.)"
    )
    yield "The linear rule is derived for SGD, whose update grows with the gradient; Adam's does not."


def _steps(rates: LearningRates) -> str:
    if rates.scaling > 1:
        return f"{times(rates.scaling)} steps of the known one"
    return f"{times(rates.scaling)} of a step of the known one"


def times_root(rates: LearningRates) -> str:
    """The square root of the scaling."""
    return number(float(rates.scaling) ** 0.5)
