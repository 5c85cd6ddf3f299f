"""An explanation as plain sentences, with the numbers worked out."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.explain.arithmetic import Explanation
from ddp_equivalence.commands.explain.epoch_text import epoch_sentences
from ddp_equivalence.commands.explain.numbers import as_many, number, of_g, times
from ddp_equivalence.commands.explain.optimizer_text import mend_sentences, optimizer_sentences
from ddp_equivalence.commands.explain.rates_text import rate_sentences
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.commands.explain.setup_text import batch_sentences, setup_sentences
from ddp_equivalence.report.wrapping import wrapped


def render(explanation: Explanation) -> str:
    """The text of ``ddp-equivalence explain``, in lines of the run's width."""
    lines = [*wrapped(_headline(explanation), "", ""), ""]
    paragraphs = (
        ("Setup", setup_sentences(explanation.setup)),
        ("Effective batch", batch_sentences(explanation)),
        ("Gradient", _gradient_sentences(explanation)),
        ("What to do", mend_sentences(explanation)),
        ("Learning rate", rate_sentences(explanation)),
        ("Optimizer", optimizer_sentences(explanation)),
        ("Epoch", epoch_sentences(explanation)),
    )
    for head, sentences in paragraphs:
        for place, sentence in enumerate(sentences):
            said = f"  {head}: " if place == 0 else "      "
            lines += wrapped(sentence, "      ", said)
    return "\n".join(lines) + "\n"


def _headline(explanation: Explanation) -> str:
    rates, factor, epoch = explanation.learning_rates, explanation.factor, explanation.epoch
    batch = f"Effective batch {explanation.effective_batch}"
    if epoch is not None and epoch.largest_step < explanation.effective_batch:
        batch += ", which no step of an epoch has"
    if rates is not None and rates.scaling != 1:
        batch += f", {as_many(rates.scaling)} the known one"
    if not explanation.is_multiple:
        return f"{batch}. The gradient is no multiple of the big batch's: see what to do."
    held = f"{batch}. The gradient is "
    held += f"{times(factor)} times the big batch's" if factor != 1 else "the big batch's"
    if rates is None:
        return f"{held}."
    if rates.scaling == 1:
        return f"{held}; the learning rate is {number(rates.same_step)}."
    values = (rates.same_step, rates.square_root, rates.linear)
    *first, last = (number(rate) for rate in values)
    return f"{held}; the learning rate is {', '.join(first)} or {last}, by what it is to keep."


def _gradient_sentences(explanation: Explanation) -> Iterator[str]:
    setup, batch, factor = explanation.setup, explanation.effective_batch, explanation.factor
    over = "the one example" if batch == 1 else f"these {batch} examples, in one batch"
    tokens = "all tokens of " if setup.loss == "token-mean" else ""
    yield f"g is the gradient of the mean loss over {tokens}{over} on one device."
    if max(setup.replicas, setup.processes, setup.accumulation) > 1:
        yield _for_which_losses(setup)
    yield f"What divides: {'; '.join(divisor.what for divisor in explanation.divisors)}."
    if setup.loss == "token-mean":
        yield from _token_sentences(explanation)
        return
    if not explanation.is_multiple:
        shares = ", ".join(
            f"{times(share)} in a replica with {size}"
            for size, share in dict.fromkeys(explanation.shares)
        )
        yield f"So it is no multiple of g: an example counts {shares} (1 as in the big batch)."
        return
    together = batch / factor
    product = " x ".join(str(one.number) for one in explanation.divisors if one.number != 1)
    product = f"{product} = " if " x " in product else ""
    yield f"In all by {product}{number(together)}; the big batch's mean divides by {batch}."
    who = "every rank holds" if setup.processes > 1 else "the gradient is"
    ratio = "" if factor == 1 else f"{batch} / {number(together)} = "
    yield f"So {who} {ratio}{of_g(factor)}."
    if setup.loss == "sum":
        yield (
            "That is for a loss with one value an example, such as cross entropy. "
            'nn.MSELoss(reduction="sum") adds up the elements of each example as well, and its '
            "factor is as many times larger."
        )


def _for_which_losses(setup: Setup) -> str:
    what = {
        "mean": "a mean over examples",
        "sum": "a sum over examples",
        "token-mean": "a mean over tokens of examples",
    }[setup.loss]
    return (
        f"This is for a loss that is {what}, each on its own; not for batch norm, dropout, class "
        "weights (`weight=`) or contrastive losses."
    )


def _token_sentences(explanation: Explanation) -> Iterator[str]:
    setup, factor = explanation.setup, explanation.factor
    if explanation.is_multiple:
        yield "One loss sees all tokens of the step, as in the big batch. So the gradient is g."
        return
    losses = len(setup.loss_sizes) * setup.accumulation * setup.processes
    yield (
        f"So it is no multiple of g where counts differ: each of {losses} means in a step weighs "
        "the same, however many tokens it has, and a token among few counts more."
    )
    yield f"On average over the tokens it is {of_g(factor)}, which it is if all counts are equal."
