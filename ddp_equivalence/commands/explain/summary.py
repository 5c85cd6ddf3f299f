"""The answer of ``ddp-equivalence explain`` in a few lines. ``--full`` says how it follows."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.numbers import number, times
from ddp_equivalence.commands.explain.optimizer_text import mend_sentences
from ddp_equivalence.commands.explain.presets import scheduler_of_accelerate
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.commands.explain.starting_point import starting_point
from ddp_equivalence.commands.explain.text import gradient_in_words
from ddp_equivalence.report.wrapping import plural, wrapped


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
        batch += ", the known one" if same else f"; the known one is {known.batch}"
    if not explanation.is_multiple:
        return f"{batch}. The gradient is no multiple of the big batch's."
    return f"{batch}. The gradient is {gradient_in_words(explanation)}."


def _advice(explanation: Explanation) -> Iterator[str]:
    """What to do about the gradient, the learning rate, and the settings beside it."""
    rates, setup = explanation.learning_rates, explanation.setup
    the, start_with = "The", "Start with"
    if not explanation.is_multiple:
        yield f"Mend it: {' '.join(mend_sentences(explanation))}"
        the, start_with = (f"With that change, {word}" for word in ("the", "start with"))
    factor = rates.relative if rates else explanation.mended_factor / explanation.unit
    by = 1 if setup.optimizer == "adam" else 1 / factor
    if rates is None:
        loss = "summed" if explanation.compares_sums else "mean"
        rate = "" if by == 1 else f", times {times(by)}"
        of = f"that of one device with a {loss} loss and this batch"
        yield f"{the} learning rate is {of}{rate}."
        keep = "the learning rate of one device"
    elif rates.scaling == 1:
        same = "every update is then the same as on one device"
        yield f"{the} learning rate is {number(rates.same_step)}: {same}."
        keep = number(rates.same_step / by)
    else:
        start = starting_point(explanation, rates)
        rate = f"learning rate {number(start.rate)} {start.how}"
        yield f"{start_with} {rate}: {start.why}. {start.others}"
        yield start.beside
        keep = number(start.rate / float(by))
    if factor == 1:
        return
    if setup.optimizer == "adam":
        yield (
            f"Adam cancels the factor {times(factor)}, but eps, clipping and Adam's weight_decay "
            f"do not. Multiply the loss by {times(1 / factor)}, and they need no change."
        )
    else:
        yield (
            f"Or multiply the loss by {times(1 / factor)} and take {keep}: weight_decay and "
            "clipping then need no change."
        )


def _epoch(explanation: Explanation) -> Iterator[str]:
    """The steps of an epoch, and what a scheduler makes of them."""
    setup, epoch = explanation.setup, explanation.epoch
    if epoch is not None:
        steps = f"An epoch has {epoch.steps} {plural(epoch.steps, 'step')}"
        if epoch.largest_step < explanation.effective_batch:
            steps += f", the largest of {epoch.largest_step} examples"
        if epoch.repeated:
            examples = f"{epoch.repeated} {plural(epoch.repeated, 'example')}"
            steps += f"; it repeats {examples} at its end"
        yield f"{steps}."
    if setup.like == "accelerate" and setup.processes > 1:
        yield scheduler_of_accelerate(setup.processes)


def _more(setup: Setup) -> str:
    only = ""
    if max(setup.replicas, setup.processes, setup.accumulation) > 1:
        only = "Not for batch norm, dropout, class weights or contrastive losses. "
    return f"{only}How this follows: --full."
