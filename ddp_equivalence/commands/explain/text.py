"""An explanation as plain sentences, with the numbers worked out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ddp_equivalence.commands.explain.epoch_text import epoch_sentences
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.numbers import as_many, number, of_g, times
from ddp_equivalence.commands.explain.optimizer_text import mend_sentences, optimizer_sentences
from ddp_equivalence.commands.explain.presets import preset_sentences
from ddp_equivalence.commands.explain.rates_text import rate_sentences
from ddp_equivalence.commands.explain.setup import Setup, token_counts
from ddp_equivalence.commands.explain.setup_text import batch_sentences, setup_sentences
from ddp_equivalence.commands.explain.starting_point import starting_point
from ddp_equivalence.report.wrapping import wrapped


def explanation_text(explanation: Explanation) -> str:
    """The text of ``ddp-equivalence explain``, in lines of the run's width."""
    lines = [*wrapped(_headline(explanation), "", ""), ""]
    paragraphs = (
        ("Setup", chain(setup_sentences(explanation.setup), preset_sentences(explanation.setup))),
        ("Effective batch", batch_sentences(explanation)),
        ("Gradient", _gradient_sentences(explanation)),
        ("What to do", mend_sentences(explanation)),
        ("Learning rate", rate_sentences(explanation)),
        ("Optimizer", optimizer_sentences(explanation)),
        ("Epoch", epoch_sentences(explanation)),
    )
    for head, sentences in paragraphs:
        for position, sentence in enumerate(sentences):
            first_indent = f"  {head}: " if position == 0 else "      "
            lines += wrapped(sentence, "      ", first_indent)
    return "\n".join(lines) + "\n"


def _headline(explanation: Explanation) -> str:
    rates, epoch = explanation.learning_rates, explanation.epoch
    batch = f"Effective batch {explanation.effective_batch}"
    if epoch is not None and epoch.largest_step < explanation.effective_batch:
        batch += ", which no step of an epoch has"
    if rates is not None and rates.scaling != 1:
        batch += f", {as_many(rates.scaling)} the known one"
    if not explanation.is_multiple:
        return f'{batch}. The gradient is no multiple of the big batch\'s: see "What to do".'
    gradient = f"{batch}. The gradient is {gradient_in_words(explanation)}"
    if rates is None:
        return f"{gradient}."
    if rates.scaling == 1:
        return f"{gradient}; the learning rate is {number(rates.same_step)}."
    start = number(starting_point(explanation, rates).rate)
    return f"{gradient}; the learning rate to start with is {start}."


def gradient_in_words(explanation: Explanation) -> str:
    """``1/4 of the big batch's``, or of another loss that the known learning rate is for."""
    known, batch = explanation.setup.known_good, "the big batch's"
    if known is not None and known.loss == "sum" and not explanation.compares_sums:
        # The summed losses of two batches differ in size, so that of the known batch is named.
        batch = f"that of the summed loss with batch {known.batch}"
        factor = explanation.factor / known.factor
    else:
        factor = explanation.factor / explanation.unit
        if explanation.compares_sums and explanation.setup.loss != "sum":
            batch = "that of the big batch's summed loss"
    if factor == 1:
        return batch
    return f"{as_many(factor)} {batch}"


def _gradient_sentences(explanation: Explanation) -> Iterator[str]:
    setup, batch = explanation.setup, explanation.effective_batch
    factor = explanation.factor / explanation.unit
    over = "the one example" if batch == 1 else f"these {batch} examples, in one batch"
    tokens = "all tokens of " if setup.loss == "token-mean" else ""
    loss = "summed" if explanation.compares_sums else "mean"
    yield f"g is the gradient of the {loss} loss over {tokens}{over} on one device."
    if max(setup.replicas, setup.processes, setup.accumulation) > 1:
        yield _for_which_losses(setup)
    divisions = "; ".join(divisor.what for divisor in explanation.divisors)
    yield f"{divisions[0].upper()}{divisions[1:]}."
    if setup.loss == "token-mean":
        yield from _token_sentences(explanation)
        return
    if not explanation.is_multiple:
        shares = " and ".join(
            f"{times(share)} in a replica with {size}"
            for size, share in dict.fromkeys(explanation.shares)
        )
        yield (
            f"So the gradient is no multiple of g: an example counts {shares}. In the big batch "
            "every example counts 1."
        )
        return
    together = batch / explanation.factor
    divisors = [one.number for one in explanation.divisors if one.number not in (1, None)]
    product = " x ".join(times(one) for one in divisors if one)
    product = f"{product} = " if len(divisors) > 1 else ""
    of_one = "sum does not divide" if explanation.compares_sums else f"mean divides by {batch}"
    yield f"Together this divides by {product}{times(together)}; the big batch's {of_one}."
    who = "every rank holds" if setup.processes > 1 else "the gradient is"
    whole = 1 if explanation.compares_sums else batch
    ratio = "" if factor == 1 or whole == 1 else f"{whole} / {times(together)} = "
    yield f"So {who} {ratio}{of_g(factor)}."
    if setup.known_good is not None and setup.loss != setup.known_good.loss:
        how = "adds up" if setup.loss == "sum" else "divides by"
        yield (
            "That is for a loss with one value per example, such as cross entropy. "
            f'nn.MSELoss(reduction="{setup.loss}") also {how} the elements of each example, so its '
            f"factor is {'larger' if setup.loss == 'sum' else 'smaller'} by their number."
        )


def _for_which_losses(setup: Setup) -> str:
    what = {
        "mean": "a mean over examples",
        "sum": "a sum over examples",
        "token-mean": "a mean over tokens of examples",
    }[setup.loss]
    return (
        f"This is for a loss that is {what} and takes each example on its own. It is not for batch "
        "norm, dropout, class weights (`weight=`) or contrastive losses."
    )


def _token_sentences(explanation: Explanation) -> Iterator[str]:
    setup, factor = explanation.setup, explanation.factor
    if explanation.is_multiple:
        who = "every rank holds" if setup.processes > 1 else "the gradient is"
        yield (
            f"One count is of all tokens of the step, as in the big batch. So {who} {of_g(factor)}."
        )
        return
    yield (
        "So the gradient is no multiple of g if the counts differ: each of the "
        f"{token_counts(setup)} means in a step weighs the same, however many tokens it has, and a "
        "token in a mean of few tokens counts more."
    )
    yield (
        f"On average over the tokens the gradient is {of_g(factor)}; if all counts are equal, it "
        "is exactly that."
    )
