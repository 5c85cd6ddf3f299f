"""What to do about unequal counts, what the optimizer makes of a factor, and what an epoch has."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.explain.arithmetic import Explanation, framework_divisor
from ddp_equivalence.explain.numbers import times
from ddp_equivalence.explain.setup import Setup
from ddp_equivalence.prose import plural


def mend_sentences(explanation: Explanation) -> Iterator[str]:
    """How to make a gradient g that is no multiple of it."""
    setup = explanation.setup
    if explanation.is_multiple:
        return
    if setup.parallelism == "data-parallel-loss-inside" and setup.loss != "token-mean":
        yield (
            f"make the batch a multiple of {setup.replicas}, or take one loss over the gathered "
            "outputs (data-parallel)."
        )
        return
    count = f"count the tokens of all {setup.accumulation} micro-batches" if (
        setup.accumulation > 1
    ) else "count the tokens of the batch"
    reduced = " and all_reduce the count, a sum" if setup.processes > 1 else ""
    yield f"{count} before the first backward{reduced}: T."
    yield f"Then backward from {_mended_loss(setup)}, not divided by anything else. That gives g."


def _mended_loss(setup: Setup) -> str:
    number = framework_divisor(setup)
    if setup.parallelism == "data-parallel-loss-inside":
        return 'the sum of the replicas\' summed losses (reduction="sum") / T'
    return f'the summed loss (reduction="sum") x {number} / T' if number > 1 else (
        'the summed loss (reduction="sum") / T'
    )


def optimizer_sentences(explanation: Explanation) -> Iterator[str]:
    """What a factor does beside the learning rate; nothing where there is none."""
    rates = explanation.learning_rates
    factor = explanation.factor if rates is None else rates.relative
    if factor == 1 or not explanation.is_multiple:
        if explanation.setup.optimizer == "adam" and not explanation.is_multiple:
            yield "Adam cancels a factor, but not unequal counts."
        return
    by = times(factor)
    if explanation.setup.optimizer == "adam":
        yield (
            f"Adam divides by the gradient's own size, so that the factor {by} cancels but for "
            f"eps: with eps x {by} nothing is left of it."
        )
        yield (
            f"Adam's weight_decay is added to the gradient: x {by}. AdamW's is not: unchanged. "
            f"Clipping sees the factor: max_norm x {by}."
        )
        yield f"Or multiply the loss by {times(1 / factor)}, and keep all settings."
        return
    yield (
        f"if the learning rate is divided by {by} instead of the loss: weight_decay x {by}, since "
        f"it is added to a gradient of that size; and max_norm of clipping x {by}, or it "
        "bites at another place. Momentum stays."
    )


def epoch_sentences(explanation: Explanation) -> Iterator[str]:
    """Steps in an epoch, what is repeated and what is left out."""
    epoch, setup = explanation.epoch, explanation.setup
    if epoch is None:
        return
    alone = setup.processes == 1
    whose = "" if alone else f", {epoch.examples_each} a rank (DistributedSampler)"
    batches = f"{epoch.micro_batches} {plural(epoch.micro_batches, 'batch', 'batches')}"
    last = "" if epoch.last_batch == setup.batch else f", the last of {epoch.last_batch}"
    yield f"{setup.examples} examples{whose}: {batches} of {setup.batch}{last}."
    steps = f"{epoch.steps} optimizer {plural(epoch.steps, 'step')}"
    if setup.accumulation == 1:
        yield f"{steps}."
    elif not epoch.rest:
        yield f"{steps} of {setup.accumulation} micro-batches."
    else:
        yield from _short_window(explanation, steps)
    if epoch.repeated:
        verb = "is" if epoch.repeated == 1 else "are"
        yield (
            f"{epoch.repeated} {plural(epoch.repeated, 'example')} {verb} repeated, so that every "
            f"rank has as many: {setup.processes} x {epoch.examples_each} = "
            f"{setup.processes * epoch.examples_each}."
        )
    if epoch.dropped:
        verb = "is" if epoch.dropped == 1 else "are"
        yield f"{epoch.dropped} {plural(epoch.dropped, 'example')} {verb} left out (drop_last)."
    known = setup.known_good
    if known is not None and setup.examples is not None and known.batch != setup.effective_batch:
        steps_then = -(-setup.examples // known.batch)
        yield (
            f"With the known batch of {known.batch} an epoch has {steps_then} "
            f"{plural(steps_then, 'step')}."
        )


def _short_window(explanation: Explanation, steps: str) -> Iterator[str]:
    epoch, setup = explanation.epoch, explanation.setup
    assert epoch is not None
    rest, whole = epoch.rest, setup.accumulation
    left = f"{rest} micro-{plural(rest, 'batch', 'batches')}"
    yield (
        f"{epoch.full_steps} optimizer {plural(epoch.full_steps, 'step')} of {whole} "
        f"micro-batches, and {left} left over: {steps} if the loop steps on these as well."
    )
    if setup.accumulation_divided:
        yield (
            f"There divide by {rest}: divided by {whole}, that step is {rest}/{whole} of what it "
            "should be. If the loop does not step, clear the gradient, or it goes into the next "
            "epoch."
        )
    else:
        yield (
            f"That step's gradient is {rest}/{whole} as large as the others, with the same "
            "learning rate. If the loop does not step, clear the gradient, or it goes into the "
            "next epoch."
        )
