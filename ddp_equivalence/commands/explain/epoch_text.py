"""An epoch in words: its steps, its last step, and which examples are repeated or left out."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.explain.epochs import Epoch
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.last_step import is_as_on_one_device, last_step_sentences
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.report.wrapping import plural


def epoch_sentences(explanation: Explanation) -> Iterator[str]:
    """Sentences on the steps of an epoch; none if the dataset's size was not given."""
    epoch, setup = explanation.epoch, explanation.setup
    if epoch is None:
        return
    if epoch.largest_step < explanation.effective_batch:
        too_small = f"No step has all {explanation.effective_batch} examples"
        rates, not_for = explanation.learning_rates, ""
        if rates is not None and rates.scaling != 1:
            not_for = " The learning rates above are not for such a step."
        yield f"{too_small}: the largest has {epoch.largest_step}.{not_for}"
    yield _batches(setup, epoch)
    if setup.accumulation > 1:
        yield from _window_sentences(setup, epoch)
    yield from last_step_sentences(explanation, epoch)
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


def unlike_one_device(explanation: Explanation) -> int:
    """How many updates at the end of an epoch are not those of one device with the whole batch.

    They are more than one where more examples are repeated than the last step has. A shorter last
    step of whole batches is one that one device with drop_last does not take.
    """
    epoch = explanation.epoch
    if epoch is None or not epoch.repeated:
        not_taken = epoch is not None and explanation.setup.drop_last and epoch.rest > 0
        return int(not_taken or not is_as_on_one_device(explanation))
    before_the_last = max(0, epoch.repeated - epoch.last_step)
    return min(epoch.steps, 1 + -(-before_the_last // explanation.effective_batch))


def which_updates(explanation: Explanation) -> str | None:
    """``every update but an epoch's last is``: which are the same as on one device; None: none."""
    epoch, batch = explanation.epoch, explanation.effective_batch
    if epoch is None:
        return "every update is" if batch == 1 else f"every update of {batch} examples is"
    others = unlike_one_device(explanation)
    if not others:
        return "every update is"
    if others == epoch.steps:
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
        twice = plural(epoch.repeated, "It counts", "They count")
        which = "update is" if epoch.repeated <= epoch.last_step else "updates are"
        return (
            f"{epoch.repeated} {verb} repeated, {why}. {twice} twice, the second time at the end "
            f"of the epoch, so its last {which} not as on one process."
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
    batches = f"{rest} {plural(rest, 'micro-batch', 'micro-batches')}"
    if setup.like is not None:
        yield f"{full}, and one of {rest}." if epoch.full_steps else f"1 step of {batches}."
    elif epoch.full_steps:
        yield (
            f"{full}, and one of {rest} if the loop steps at the end of an epoch. If it does not, "
            "clear the gradient there, or it is added to the next epoch's first step."
        )
    else:
        yield (
            f"1 step, of {batches}, if the loop steps at the end of an epoch; none if it does not."
        )
