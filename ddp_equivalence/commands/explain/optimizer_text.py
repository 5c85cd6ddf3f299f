"""What mends unequal counts, and what a factor on the gradient does beside the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.explain.arithmetic import Explanation, framework_divisor
from ddp_equivalence.commands.explain.numbers import number, of_g, times
from ddp_equivalence.commands.explain.setup import Setup


def mend_sentences(explanation: Explanation) -> Iterator[str]:
    """How to make g of a gradient that is no multiple of it."""
    setup = explanation.setup
    if explanation.is_multiple:
        return
    if setup.loss != "token-mean":
        yield (
            f"make the batch a multiple of {setup.replicas}, or take one loss over the gathered "
            f"outputs (data-parallel). Either gives {of_g(explanation.mended_factor)}."
        )
        yield (
            f"A multiple of {setup.replicas} also changes the effective batch: ask again with that "
            "batch."
        )
        return
    of = f"all {setup.accumulation} micro-batches" if setup.accumulation > 1 else "the batch"
    reduced = ", and all_reduce the count (sum)" if setup.processes > 1 else ""
    yield f"count the tokens of {of} before the first backward{reduced}: T."
    yield f"Then take {_mended_loss(setup)}, not divided by anything else. That gives g."


def _mended_loss(setup: Setup) -> str:
    averaged = framework_divisor(setup)
    if setup.parallelism == "data-parallel-loss-inside":
        return 'the sum of the replicas\' losses, with reduction="sum", / T'
    by = f"x {averaged} / T" if averaged > 1 else "/ T"
    return f'the loss with reduction="sum" {by}'


def optimizer_sentences(explanation: Explanation) -> Iterator[str]:
    """What a factor does beside the learning rate; nothing where there is none."""
    rates, adam = explanation.learning_rates, explanation.setup.optimizer == "adam"
    factor = explanation.mended_factor if rates is None else rates.relative
    if not explanation.is_multiple and adam:
        yield "Adam cancels a factor on the gradient, but not unequal counts."
    if factor == 1:
        return
    by, back = f"x {times(factor)}", f"multiply the loss by {times(1 / factor)}"
    if adam:
        eps = f"with eps {by}"
        if rates is not None and rates.names_eps:
            assert rates.adam is not None
            eps = f"with {by} of the eps above, {number(rates.adam.eps * factor)},"
        yield (
            f"Adam divides by the gradient's own size, and the factor {times(factor)} cancels but "
            f"for eps: {eps} nothing of it is left."
        )
        yield (
            f"Adam's weight_decay is added to the gradient: {by}. AdamW's is not: as it was. "
            f"Clipping sees the factor: max_norm {by}."
        )
        yield f"Or {back}, and keep all settings."
        return
    yield (
        f"with the learning rate changed instead of the loss, weight_decay {by} (it is added to "
        f"the gradient) and clipping's max_norm {by}. Momentum as it was."
    )
