"""What a verification leaves out of what was said, in phrases."""

from __future__ import annotations

from ddp_equivalence.commands.explain.arithmetic import Explanation


def not_run(explanation: Explanation) -> tuple[str, ...]:
    """In the order of the text."""
    setup, rates = explanation.setup, explanation.learning_rates
    found = []
    if setup.optimizer == "adam":
        found.append("training with Adam, its learning rates and settings")
    elif rates is not None and rates.scaling != 1:
        found.append("the square-root and the linear learning rate")
    factor = explanation.mended_factor if rates is None else rates.relative
    if factor != 1 and setup.optimizer == "sgd":
        found.append("weight decay, clipping and momentum")
    if setup.examples is not None:
        found.append("the epoch")
    return tuple(found)
