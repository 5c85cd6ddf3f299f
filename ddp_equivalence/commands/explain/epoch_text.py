"""An epoch in words: its steps, its last step, and which examples are repeated or left out."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ddp_equivalence.commands.explain.epochs import Epoch, last_sum
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.numbers import times
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.report.wrapping import plural


def epoch_sentences(explanation: Explanation) -> Iterator[str]:
    """Sentences on the steps of an epoch; none if the dataset's size was not given."""
    epoch, setup = explanation.epoch, explanation.setup
    if epoch is None:
        return
    if epoch.largest_step < explanation.effective_batch:
        yield (
            f"No step has all {explanation.effective_batch} examples: the largest has "
            f"{epoch.largest_step}. The learning rate above is not for such a step."
        )
    yield _batches(setup, epoch)
    if setup.accumulation > 1:
        yield from _window_sentences(setup, epoch)
    yield from _last_batch_sentences(explanation, epoch)
    if setup.loss == "sum":
        yield from _last_sum_sentences(setup, epoch)
    if epoch.repeated:
        yield _repeated(setup, epoch)
    if epoch.dropped:
        verb = plural(epoch.dropped, "example is", "examples are")
        yield f"{epoch.dropped} {verb} left out (drop_last)."
    known = setup.known_good
    if known is not None and setup.examples is not None and known.batch != setup.effective_batch:
        whole, remainder = divmod(setup.examples, known.batch)
        then = whole + (remainder > 0 and not setup.drop_last)
        steps = f"{then} {plural(then, 'step')}"
        yield f"With the known batch of {known.batch} an epoch has {steps}."


def last_is_as_on_one_device(explanation: Explanation) -> bool:
    """True if the last update of an epoch is one device's with the same examples in one batch.

    Repeated examples are not counted here. False also where it depends on the user's loop.
    """
    epoch, setup = explanation.epoch, explanation.setup
    if epoch is None or not (epoch.rest or epoch.last_batch != setup.batch):
        return True
    if len(setup.loss_sizes) > 1:
        return False
    if explanation.compares_sums:
        return setup.loss == "sum"
    return setup.loss == "mean" and setup.accumulation == 1


def unlike_one_device(explanation: Explanation) -> int:
    """How many updates at the end of an epoch are not those of one device with the whole batch.

    They are more than one where more examples are repeated than the last step has.
    """
    epoch = explanation.epoch
    if epoch is None or not epoch.repeated:
        return int(not last_is_as_on_one_device(explanation))
    before_the_last = max(0, epoch.repeated - epoch.last_step)
    return min(epoch.steps, 1 + -(-before_the_last // explanation.effective_batch))


def which_updates(explanation: Explanation) -> str | None:
    """``every update but an epoch's last is``: which are the same as on one device; None: none."""
    others = unlike_one_device(explanation)
    if not others:
        return "every update is"
    if explanation.epoch is not None and others == explanation.epoch.steps:
        return None
    return f"every update but an epoch's last {'' if others == 1 else f'{others} '}is"


def _batches(setup: Setup, epoch: Epoch) -> str:
    dealt = "full batches" if setup.deals_full_batches else "DistributedSampler"
    whose = "" if setup.processes == 1 else f", {epoch.examples_each} a rank ({dealt})"
    what = f"{setup.examples} {plural(setup.examples or 0, 'example')}{whose}"
    short, alone = epoch.last_batch != setup.batch, epoch.micro_batches == 1
    last = f", the last of {epoch.last_batch}" if short else ""
    batches = f"{epoch.micro_batches} batches of {setup.batch}{last}"
    if alone:
        batches = f"1 batch, of {epoch.last_batch}"
    steps = ": 1 step" if alone else ", and as many steps"
    return f"{what}: {batches}{steps if setup.accumulation == 1 else ''}."


def _repeated(setup: Setup, epoch: Epoch) -> str:
    assert setup.examples is not None
    dealt = setup.processes * epoch.examples_each
    each = epoch.examples_each
    why = f"so that every rank gets the same number: {setup.processes} x {each} = {dealt}"
    if epoch.repeated <= setup.examples:
        verb = plural(epoch.repeated, "example is", "examples are")
        which = "update is" if epoch.repeated <= epoch.last_step else "updates are"
        return (
            f"{epoch.repeated} {verb} repeated, {why}. They come at the end of each epoch and "
            f"count twice in it, so its last {which} not as on one process."
        )
    often, more = divmod(dealt, setup.examples)
    seen = f"{often} or {often + 1}" if more else str(often)
    return f"Every example is seen {seen} times, {why}."


def _window_sentences(setup: Setup, epoch: Epoch) -> Iterator[str]:
    rest, whole = epoch.rest, setup.accumulation
    full = f"{epoch.full_steps} {plural(epoch.full_steps, 'step')} of {whole} micro-batches"
    if not rest:
        yield f"{full}."
        return
    if setup.like is not None:
        yield f"{full}, and one of {rest}."
    elif epoch.full_steps:
        yield (
            f"{full}, and one of {rest} if the loop steps at the end of an epoch. If it does not, "
            "clear the gradient there, or it is added to the next epoch's first step."
        )
    else:
        yield (
            f"1 step, of {rest} {plural(rest, 'micro-batch', 'micro-batches')}, if the loop steps "
            "at the end of an epoch; none if it does not."
        )
    if setup.loss == "sum":
        return
    if setup.tokens_over != "micro-batch" and not setup.accumulation_divided:
        yield "That step counts its own tokens, so its gradient is as large as it should be."
    elif setup.like == "hf-trainer" and setup.loss == "mean" and setup.accumulation_divided:
        yield f"The Trainer divides by {rest} in that step, so its gradient is as it should be."
    elif setup.like is not None and setup.accumulation_divided:
        yield (
            f"The trainer still divides by {whole} in that step, so its gradient is "
            f"{rest}/{whole} as large as it should be."
        )
    elif setup.accumulation_divided:
        yield (
            f"Divide by {rest} in that step: if you divide by {whole}, its gradient is "
            f"{rest}/{whole} as large as it should be."
        )
    else:
        yield f"That step's gradient is {rest}/{whole} as large as {_others(epoch)}."


def _last_batch_sentences(explanation: Explanation, epoch: Epoch) -> Iterator[str]:
    """Says where the examples of the last batch count differently from the others of its step."""
    setup, last, sizes = explanation.setup, epoch.last_batch, epoch.last_sizes
    if last == setup.batch or setup.loss == "token-mean":
        return
    alone = (epoch.rest or setup.accumulation) == 1
    if setup.loss == "mean" and not alone:
        yield (
            f"The last batch, of {last}, weighs as much as the full batches in its step: each of "
            f"its examples counts {setup.batch}/{last} times as often as one in a full batch. "
            "drop_last leaves the last batch out."
        )
    if setup.loss == "mean" and len(set(sizes)) > 1 and explanation.is_multiple:
        yield (
            f"The last batch is dealt unevenly, {' + '.join(map(str, sizes))}: in its step the "
            "gradient is no multiple of the big batch's. drop_last leaves the last batch out."
        )
    more = Fraction(len(setup.loss_sizes), len(sizes))
    if setup.loss == "sum" and not alone and more != 1:
        yield (
            f"The last batch, of {last}, goes to {len(sizes)} {plural(len(sizes), 'replica')}: "
            f"each of its examples counts {times(more)} times as often as one in a full batch of "
            "its step. drop_last leaves the last batch out."
        )


def _last_sum_sentences(setup: Setup, epoch: Epoch) -> Iterator[str]:
    """Says how large the gradient of a shorter last step is if the losses are sums."""
    size = last_sum(setup, epoch)
    if size == 1:
        return
    examples = ((epoch.rest or setup.accumulation) - 1) * setup.batch + epoch.last_batch
    each = " a rank" if setup.processes > 1 else ""
    what = f"adds up {examples} {plural(examples, 'example')}{each}"
    if len(setup.loss_sizes) > 1:
        dealt = " + ".join(map(str, epoch.last_sizes))
        what = f"has {examples} {plural(examples, 'example')}, and its last batch is dealt {dealt}"
    yield f"The last step {what}: its gradient is {size} as large as {_others(epoch)}."


def _others(epoch: Epoch) -> str:
    return "that of the other steps" if epoch.steps > 1 else "that of a whole step"
