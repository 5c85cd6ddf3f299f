"""Sentences on learning rates: what each of them keeps. The reader decides what matters."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ddp_equivalence.commands.explain.epoch_text import which_updates
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.known_good import KnownGood
from ddp_equivalence.commands.explain.learning_rates import SMALLEST_BETA, LearningRates
from ddp_equivalence.commands.explain.numbers import as_many, beta, divided_by, number, of_g, times
from ddp_equivalence.commands.explain.starting_point import starting_point


def rate_sentences(explanation: Explanation) -> Iterator[str]:
    """Sentences on the learning rate.

    If none is known to be good, they say how to divide one that works on one device.
    """
    rates, known = explanation.learning_rates, explanation.setup.known_good
    if rates is None or known is None:
        yield from _without_known(explanation)
    elif rates.scaling == 1:
        yield from _at_the_same_batch(explanation, rates, known)
    else:
        yield from _at_another_batch(explanation, rates, known)


def _without_known(explanation: Explanation) -> Iterator[str]:
    factor = explanation.mended_factor / explanation.unit
    loss = "summed" if explanation.compares_sums else "mean"
    if explanation.setup.is_adam:
        change = ", unchanged, because Adam cancels a constant factor"
    else:
        change = ", unchanged" if factor == 1 else f", {_divided_in_words(factor)}"
    change += "" if explanation.is_multiple else ", with the change above"
    yield (
        f"the one that works on one device with a {loss} loss and batch "
        f"{explanation.effective_batch}{change}."
    )
    yield "If you know one that worked with any other batch, give it: --known-good BATCH@LR."


def _divided_in_words(factor: Fraction) -> str:
    return f"divided by {times(factor)}" if factor >= 1 else f"multiplied by {times(1 / factor)}"


def _at_the_same_batch(
    explanation: Explanation, rates: LearningRates, known: KnownGood
) -> Iterator[str]:
    was, now = number(known.learning_rate), number(rates.same_step)
    adam, ranks = explanation.setup.is_adam, explanation.setup.processes
    if not explanation.is_multiple:
        by = f"{was} {divided_by(rates.relative)} = " if rates.relative != 1 and not adam else ""
        yield (
            f"{by}{now} with that change, as on one device{_which(explanation)}. Without it, no "
            "learning rate trains the same."
        )
    elif adam:
        cancels = " Adam cancels the factor of the gradient." if rates.relative != 1 else ""
        yield f"{now}, as on one device{_which(explanation)}.{cancels}"
    elif rates.relative == 1:
        not_by = f"{ranks}, nor by the square root of {ranks}"
        more = f" Do not multiply it by {not_by}." if ranks > 1 else ""
        yield f"{now}, as on one device{_which(explanation)}.{more}"
    else:
        rate = f"{was} {divided_by(rates.relative)} = {now}"
        yield f"{rate}{_which(explanation, 'same as on one device')}."
        yield (
            f"Or multiply the loss by {times(1 / rates.relative)} and keep {was}; then weight "
            "decay and clipping stay as they were, too."
        )


def _which(explanation: Explanation, same: str = "same") -> str:
    which = which_updates(explanation)
    if which is None:
        return (
            f", for a step of {explanation.effective_batch} different examples (an epoch has none)"
        )
    return f": {which} the {same}"


def _at_another_batch(
    explanation: Explanation, rates: LearningRates, known: KnownGood
) -> Iterator[str]:
    loss = " and a summed loss" if known.loss == "sum" else ""
    yield (
        f"{number(known.learning_rate)} worked with batch {known.batch}{loss}; "
        f"{explanation.effective_batch} is {as_many(rates.scaling)} that. No learning rate trains "
        "exactly the same; each of these keeps one thing:"
    )
    if explanation.setup.is_adam:
        yield from _for_adam(rates)
    elif rates.relative != 1:
        why = _why_divided(explanation, known)
        yield f"({why}; each rate below includes the {divided_by(rates.relative)} for that.)"
    if not explanation.setup.is_adam:
        yield from _for_sgd(rates)
    start = starting_point(explanation, rates)
    yield start.as_sentence
    if not explanation.is_multiple:
        yield (
            "All of this holds with the change above. Without it, no learning rate keeps any of "
            "these exactly."
        )


def _why_divided(explanation: Explanation, known: KnownGood) -> str:
    after = "" if explanation.is_multiple else " with the change above"
    mine = f"Your gradient is {of_g(explanation.mended_factor)}{after}"
    if known.loss == "mean":
        return mine
    return f"{mine}, and that of the summed loss was {of_g(known.factor)}"


def _for_sgd(rates: LearningRates) -> Iterator[str]:
    k = times(rates.scaling)
    yield (
        f"{number(rates.same_step)} keeps the length of a step for the same mean gradient; an "
        f"epoch has {as_many(1 / rates.scaling)} the steps."
    )
    larger = rates.scaling > 1
    caveat = (
        " They find that linear scaling fails while the weights change fast, so they warm up to it "
        "in the first epochs. They also find that it fails beyond some batch size."
        if larger
        else ""
    )
    moves = f"one step moves as far as {k} steps did with the known batch"
    if not larger:
        moves = f"{times(1 / rates.scaling)} steps move as far as one did with the known batch"
    yield (
        f"{number(rates.linear)} (linear, x {k}) keeps the update per example: {moves}, if the "
        f"gradient hardly changes meanwhile. Goyal et al. 2017, arXiv 1706.02677, section "
        f"2.1.{caveat}"
    )
    yield (
        f"{number(rates.square_root)} (square root, x {_root(rates)}) keeps the variance of the "
        "update, which comes from drawing examples. Krizhevsky 2014, arXiv 1404.5997 (for whom "
        "linear scaling worked better); Hoffer et al. 2017, arXiv 1705.08741."
    )


def _for_adam(rates: LearningRates) -> Iterator[str]:
    assert rates.adam is not None
    yield (
        f"{number(rates.same_step)} keeps the length of a step if most of the gradient is noise "
        "with both batches, or hardly any of it is: Adam divides the gradient by its own size. An "
        f"epoch has {as_many(1 / rates.scaling)} the steps."
    )
    betas = ", ".join(map(beta, rates.adam.rule_betas))
    eps = f"eps {number(rates.adam.eps)} in place of 1e-8."
    settings = f"It needs betas ({betas}) in place of yours, and {eps}"
    if not rates.adam.in_reach:
        settings = (
            f"It needs {eps} Its betas would be ({betas}), but it is derived for betas that "
            f"average over many gradients. As one is below {times(SMALLEST_BETA)}, keep yours, "
            "with which the weights move and scatter as much over many steps."
        )
    yield (
        f"{number(rates.square_root)} (square root, x {_root(rates)}) keeps the path of the "
        f"weights and its noise if noise is most of the gradient. {settings} Malladi et al. 2022, "
        "arXiv 2205.10287."
    )
    far = "goes too far" if rates.scaling > 1 else "does not go far enough"
    yield (
        f"{number(rates.linear)} (linear, x {times(rates.scaling)}) keeps the distance per epoch "
        f"if the gradient is much larger than its noise; if noise dominates, it {far}."
    )


def _root(rates: LearningRates) -> str:
    return number(float(rates.scaling) ** 0.5)
