"""The answer of ``ddp-equivalence explain`` in a few lines. ``--full`` says how it follows."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ddp_equivalence.commands.explain.epoch_text import which_updates
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.last_step import is_as_on_one_device
from ddp_equivalence.commands.explain.numbers import number, times
from ddp_equivalence.commands.explain.optimizer_text import mend_sentences
from ddp_equivalence.commands.explain.presets import scheduler_of_accelerate
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.commands.explain.starting_point import starting_point
from ddp_equivalence.commands.explain.text import gradient_in_words
from ddp_equivalence.report.wrapping import plural, wrapped

NAMES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}

SEE_A_FACTOR = {
    "sgd": "weight_decay and clipping's max_norm",
    "adam": "weight_decay, clipping's max_norm and {eps}",
    "adamw": "clipping's max_norm and {eps}",
}
"""The settings that a factor on the gradient is compared with, by optimizer."""


def summary_text(explanation: Explanation) -> str:
    """The batch, the gradient, the learning rate, what goes with it, and the steps of an epoch."""
    lines: list[str] = []
    for sentence in (
        _batch_and_gradient(explanation),
        *_advice(explanation),
        *_epoch(explanation),
        _more(explanation.setup),
    ):
        lines += wrapped(sentence, "")
    return "\n".join(lines) + "\n"


def _batch_and_gradient(explanation: Explanation) -> str:
    setup, known = explanation.setup, explanation.setup.known_good
    factors = [str(setup.batch)]
    if setup.processes > 1:
        factors.append(f"{setup.processes} {'ranks' if setup.replicas == 1 else 'processes'}")
    if setup.accumulation > 1:
        factors.append(f"{setup.accumulation} micro-batches")
    product = f" = {' x '.join(factors)}" if len(factors) > 1 else ""
    batch = f"Effective batch {explanation.effective_batch}{product}"
    if known is not None:
        same = known.batch == explanation.effective_batch
        batch += ", the known one" if same else f"; known: {known.batch}"
        if setup.loss == "sum" and known.loss == "mean":
            batch += " (mean loss; else --known-loss sum)"
    if explanation.is_multiple:
        only = ""
        if setup.like == "hf-trainer" and setup.tokens_over == "all-ranks":
            only = " (language model, transformers from 4.54 on)"
        return f"{batch}. The gradient is {gradient_in_words(explanation)}{only}."
    if setup.loss == "token-mean":
        return f"{batch}. The gradient is not the big batch's where counts of tokens differ."
    return f"{batch}. The gradient is no multiple of the big batch's."


def _advice(explanation: Explanation) -> Iterator[str]:
    """What to do about the gradient, the learning rate, and the settings beside it."""
    rates, setup = explanation.learning_rates, explanation.setup
    the, begin = "The", "With"
    if not explanation.is_multiple:
        yield f"To mend it, {' '.join(mend_sentences(explanation))}"
        the, begin = "With that change, the", "With that change and"
    factor = rates.relative if rates else explanation.mended_factor / explanation.unit
    by = 1 if setup.is_adam else 1 / factor
    if rates is None:
        loss = "summed" if explanation.compares_sums else "mean"
        rate = "" if by == 1 else f", times {times(by)}"
        of = f"that of one device with a {loss} loss and this batch"
        yield f"{the} learning rate is {of}{rate}{_beside_a_factor(setup, factor)}."
        keep = "the learning rate of one device"
    elif rates.scaling == 1:
        rate = f"{the} learning rate is {number(rates.same_step)}"
        yield f"{rate}{_for_which_updates(explanation)}{_beside_a_factor(setup, factor)}."
        keep = number(rates.same_step / by)
    else:
        start = starting_point(explanation, rates)
        rate = f"{number(start.rate)} {start.how}"
        yield f"{begin} {NAMES[setup.optimizer]} start with {rate}: {start.why}. {start.others}"
        keep = number(start.rate / float(by))
        if factor != 1:
            beside = f"{start.beside}. " if setup.optimizer == "adamw" else ""
            yield f"{beside}{_factor_at_another_batch(setup, factor, keep)}"
        elif start.beside:
            yield start.beside_with_why
        return
    if factor != 1:
        take = "" if setup.is_adam else f" take {keep},"
        yield f"Or multiply the loss by {times(1 / factor)},{take} and change nothing else."


def _for_which_updates(explanation: Explanation) -> str:
    which = which_updates(explanation)
    if which is None:
        batch = explanation.effective_batch
        return f" for a step of {batch} different examples, and an epoch has none"
    return f": {which} then the same as on one device"


def _factor_at_another_batch(setup: Setup, factor: Fraction, keep: str) -> str:
    """Two ways to deal with a factor on the gradient. ``keep``: the learning rate without it."""
    see = SEE_A_FACTOR[setup.optimizer].format(eps="that eps")
    by, loss = times(factor), times(1 / factor)
    if setup.is_adam:
        return f"Multiply {see} by {by}, or the loss by {loss}: the factor cancels in all else."
    return (
        f"Keep momentum, and multiply {see} by {by}; or multiply the loss by {loss}, take {keep}, "
        "and change nothing else."
    )


def _beside_a_factor(setup: Setup, factor: Fraction) -> str:
    """What has to be multiplied for the same update, if it is used, where the gradient is not."""
    if factor == 1:
        return ""
    see = SEE_A_FACTOR[setup.optimizer].format(eps="eps")
    return f", if you also multiply {see} by {times(factor)}"


def _epoch(explanation: Explanation) -> Iterator[str]:
    """The steps of an epoch, and what a scheduler makes of them."""
    setup, epoch = explanation.setup, explanation.epoch
    if epoch is not None:
        steps = f"An epoch has {epoch.steps} {plural(epoch.steps, 'step')}"
        if epoch.rest:
            if_taken = "" if setup.like else ", if the loop takes it"
            steps += f" with the shorter last one{if_taken}"
        if epoch.largest_step < explanation.effective_batch:
            steps += f"; the largest is of {epoch.largest_step} examples"
            rates = explanation.learning_rates
            if rates is not None and rates.scaling != 1:
                steps += ", for which the rates are not meant"
        if epoch.repeated:
            examples = f"{epoch.repeated} {plural(epoch.repeated, 'example')}"
            steps += f"; it repeats {examples} at its end"
        if epoch.dropped:
            verb = plural(epoch.dropped, "example is", "examples are")
            steps += f"; {epoch.dropped} of {setup.examples} {verb} left out (drop_last)"
        if not is_as_on_one_device(explanation):
            steps += "; for its last gradient see --full"
        yield f"{steps}."
        if setup.like == "accelerate" and setup.processes > 1:
            yield scheduler_of_accelerate(setup.processes)


def _more(setup: Setup) -> str:
    only = ""
    if max(setup.replicas, setup.processes, setup.accumulation) > 1:
        only = "Not exact with batch norm, dropout, class weights or contrastive losses. "
    return f"{only}More: --full."
