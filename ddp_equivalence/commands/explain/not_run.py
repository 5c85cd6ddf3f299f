"""The parts of an explanation that a verification does not run, as phrases."""

from __future__ import annotations

from ddp_equivalence.commands.explain.explanation import Explanation


def not_run(explanation: Explanation) -> tuple[str, ...]:
    """One phrase for each part that is not run, in the order of the text."""
    setup, rates = explanation.setup, explanation.learning_rates
    phrases = []
    if setup.optimizer == "adam":
        phrases.append("training with Adam, its learning rates and settings")
    elif rates is not None and rates.scaling != 1:
        phrases.append("the square-root and the linear learning rate")
    factor = explanation.mended_factor if rates is None else rates.relative
    if factor != 1 and setup.optimizer == "sgd":
        phrases.append("weight decay, clipping and momentum")
    if setup.examples is not None:
        phrases.append("the epoch")
    return tuple(phrases)
