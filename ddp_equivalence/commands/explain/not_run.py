"""The parts of an explanation that a verification does not run, as phrases."""

from __future__ import annotations

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.stand_in import LARGEST_RATIO, can_train


def not_run(explanation: Explanation) -> tuple[str, ...]:
    """One phrase for each part that is not run, in the order of the text."""
    setup, rates = explanation.setup, explanation.learning_rates
    phrases = []
    if rates is not None and rates.scaling != 1 and not can_train(rates.scaling):
        phrases.append(
            "the square-root and the linear learning rate (the stand-in trains with batches that "
            f"differ up to {LARGEST_RATIO} times)"
        )
    elif rates is not None and rates.adam is not None and rates.names_eps:
        betas = "betas and eps are" if rates.adam.in_reach else "eps is"
        phrases.append(f"what Adam's other {betas} good for")  # the stand-in hardly shows it
    factor = rates.relative if rates else explanation.mended_factor / explanation.unit
    if factor != 1 and not setup.is_adam:
        phrases.append("weight decay, clipping and momentum")
    elif factor != 1:
        phrases.append("weight decay and clipping")
    if setup.examples is not None:
        phrases.append("the epoch")
    return tuple(phrases)
