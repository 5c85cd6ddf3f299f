"""Sentences on how to mend unequal counts, and on the optimizer's settings that must change if the
gradient has a factor.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.loss_factor import UNCHANGED
from ddp_equivalence.commands.explain.numbers import number, of_g, times
from ddp_equivalence.commands.explain.presets import own_divisor
from ddp_equivalence.commands.explain.setup import Setup, framework_divisor


def mend_sentences(explanation: Explanation) -> Iterator[str]:
    """Says how to turn a gradient that is no multiple of g into a multiple of g."""
    setup = explanation.setup
    if explanation.is_multiple:
        return
    mended = explanation.mended_factor / explanation.unit
    if setup.loss != "token-mean":
        yield (
            f"make the batch a multiple of {setup.replicas}, or take one loss over the gathered "
            f"outputs (data-parallel). Either gives {of_g(mended)}."
        )
        yield (
            f"A multiple of {setup.replicas} also changes the effective batch, so run explain "
            "again with that batch."
        )
        return
    if setup.like == "hf-trainer":
        yield from _for_hf_trainer(setup)
        return
    of = f"all {setup.accumulation} micro-batches" if setup.accumulation > 1 else "the batch"
    reduced = ", and all_reduce the count (sum)" if setup.processes > 1 else ""
    yield f"count the tokens of {of} before the first backward{reduced}; call it T."
    multiply = " and multiply" if setup.loss_times != UNCHANGED else ""
    only = f"divide{multiply} by nothing else"
    if own_divisor(setup) > 1:
        only += f" (the trainer itself divides by {own_divisor(setup)})"
    loss = _mended_loss(setup)
    yield f"Then take {loss}, and {only}. That gives g, the big batch's gradient."


def _for_hf_trainer(setup: Setup) -> Iterator[str]:
    beside = ", and do not multiply the loss" if setup.loss_times != UNCHANGED else ""
    if setup.tokens_over == "micro-batch":
        yield (
            "take transformers 4.54 or later, and a model whose loss takes num_items_in_batch: the "
            f"Trainer then counts the tokens of all micro-batches and ranks{beside}."
        )
    else:
        yield (
            "set average_tokens_across_devices=True (in transformers from 4.46.2 on; older ones "
            f"cannot){beside}."
        )
    yield "That gives g, the big batch's gradient."


def _mended_loss(setup: Setup) -> str:
    if setup.parallelism == "data-parallel-loss-inside":
        return 'the sum of the replicas\' losses, with reduction="sum", / T'
    divided = framework_divisor(setup), own_divisor(setup)
    by = " ".join([*(f"x {number}" for number in divided if number > 1), "/ T"])
    return f'the loss with reduction="sum" {by}'


def optimizer_sentences(explanation: Explanation) -> Iterator[str]:
    """Says which other settings must change if the gradient has a factor; says nothing if not."""
    rates, adam = explanation.learning_rates, explanation.setup.is_adam
    factor = rates.relative if rates else explanation.mended_factor / explanation.unit
    if not explanation.is_multiple and adam:
        yield "Adam cancels a factor on the gradient, but it does not mend unequal counts."
    if factor == 1:
        return
    if adam:
        eps = f"Multiply eps by {times(factor)},"
        if rates is not None and rates.names_eps:
            assert rates.adam is not None
            new_eps = number(rates.adam.eps * factor)
            eps = f"Multiply the eps above by {times(factor)}, which gives {new_eps},"
        yield (
            f"Adam divides the gradient by its own size, so the factor {times(factor)} cancels, "
            f"except in the comparison with eps. {eps} and the factor cancels completely."
        )
        decay = f"Adam adds weight_decay to the gradient: multiply weight_decay by {times(factor)}."
        if explanation.setup.optimizer == "adamw":
            decay = "AdamW's weight_decay does not see the factor."
        yield f"{decay} Clipping sees the factor: multiply max_norm by {times(factor)}."
        keep = "keep all settings"
        if rates is not None and rates.scaling != 1:
            keep = "only change what is named with the learning rate above"
        yield f"Or multiply the loss by {times(1 / factor)} instead, and {keep}."
        return
    yield (
        f"if you change the learning rate and not the loss, multiply weight_decay by "
        f"{times(factor)} (SGD adds it to the gradient), and clipping's max_norm by "
        f"{times(factor)}. Momentum stays as it was."
    )
