"""An explanation as plain sentences, with the numbers worked out."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.explain.epoch_text import epoch_sentences
from ddp_equivalence.commands.explain.explanation import Explanation
from ddp_equivalence.commands.explain.numbers import as_many, number, of_g, times
from ddp_equivalence.commands.explain.optimizer_text import mend_sentences, optimizer_sentences
from ddp_equivalence.commands.explain.rates_text import rate_sentences
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.commands.explain.setup_text import batch_sentences, setup_sentences
from ddp_equivalence.report.wrapping import wrapped


def explanation_text(explanation: Explanation) -> str:
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
        for position, sentence in enumerate(sentences):
            first_indent = f"  {head}: " if position == 0 else "      "
            lines += wrapped(sentence, "      ", first_indent)
    return "\n".join(lines) + "\n"


def _headline(explanation: Explanation) -> str:
    rates, factor, epoch = explanation.learning_rates, explanation.factor, explanation.epoch
    batch = f"Effective batch {explanation.effective_batch}"
    if epoch is not None and epoch.largest_step < explanation.effective_batch:
        batch += ", which no step of an epoch has"
    if rates is not None and rates.scaling != 1:
        batch += f", {as_many(rates.scaling)} the known one"
    if not explanation.is_multiple:
        return f'{batch}. The gradient is no multiple of the big batch\'s: see "What to do".'
    gradient = f"{batch}. The gradient is "
    gradient += f"{times(factor)} times the big batch's" if factor != 1 else "the big batch's"
    if rates is None:
        return f"{gradient}."
    if rates.scaling == 1:
        return f"{gradient}; the learning rate is {number(rates.same_step)}."
    values = (rates.same_step, rates.square_root, rates.linear)
    *first, last = (number(rate) for rate in values)
    choice = f"{', '.join(first)} or {last}"
    return f"{gradient}; the learning rate is {choice}, depending on what it should keep."


def _gradient_sentences(explanation: Explanation) -> Iterator[str]:
    setup, batch, factor = explanation.setup, explanation.effective_batch, explanation.factor
    over = "the one example" if batch == 1 else f"these {batch} examples, in one batch"
    tokens = "all tokens of " if setup.loss == "token-mean" else ""
    yield f"g is the gradient of the mean loss over {tokens}{over} on one device."
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
    together = batch / factor
    product = " x ".join(
        str(divisor.number) for divisor in explanation.divisors if divisor.number != 1
    )
    product = f"{product} = " if " x " in product else ""
    yield (
        f"Together this divides by {product}{number(together)}; the big batch's mean divides by "
        f"{batch}."
    )
    who = "every rank holds" if setup.processes > 1 else "the gradient is"
    ratio = "" if factor == 1 else f"{batch} / {number(together)} = "
    yield f"So {who} {ratio}{of_g(factor)}."
    if setup.loss == "sum":
        yield (
            "That is for a loss with one value per example, such as cross entropy. "
            'nn.MSELoss(reduction="sum") also adds up the elements of each example, so its factor '
            "is larger by their number."
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
        yield "One loss sees all tokens of the step, as in the big batch. So the gradient is g."
        return
    losses = len(setup.loss_sizes) * setup.accumulation * setup.processes
    yield (
        f"So the gradient is no multiple of g if the counts differ: each of the {losses} means in "
        "a step weighs the same, however many tokens it has, and a token in a mean of few tokens "
        "counts more."
    )
    yield (
        f"On average over the tokens the gradient is {of_g(factor)}; if all counts are equal, it "
        "is exactly that."
    )
