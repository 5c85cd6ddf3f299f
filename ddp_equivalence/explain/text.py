"""An explanation as plain sentences, with the numbers worked out."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ddp_equivalence.explain.advice import epoch_sentences, mend_sentences, optimizer_sentences
from ddp_equivalence.explain.arithmetic import Explanation
from ddp_equivalence.explain.numbers import number, of_g, times
from ddp_equivalence.explain.rates_text import rate_sentences
from ddp_equivalence.explain.setup import Setup
from ddp_equivalence.prose import plural, wrapped


def render(explanation: Explanation) -> str:
    """The text of ``ddp-equivalence explain``, in lines of the run's width."""
    lines = wrapped(_headline(explanation), "", "")
    paragraphs = (
        ("Setup", _setup_sentences(explanation.setup)),
        ("Effective batch", _batch_sentences(explanation)),
        ("Gradient", _gradient_sentences(explanation)),
        ("What to do", mend_sentences(explanation)),
        ("Learning rate", rate_sentences(explanation)),
        ("Optimizer", optimizer_sentences(explanation)),
        ("Epoch", epoch_sentences(explanation)),
    )
    for head, sentences in paragraphs:
        first, *more = [*sentences] or [""]
        if first:
            lines += ["", *wrapped(f"{head}: {first}", "  ", "  ")]
        for sentence in more:
            lines += wrapped(sentence, "    ", "    ")
    return "\n".join(lines) + "\n"


def _headline(explanation: Explanation) -> str:
    rates = explanation.learning_rates
    batch = f"Effective batch {explanation.effective_batch}"
    if not explanation.is_multiple:
        return f"{batch}; the gradient is no multiple of the big batch's."
    held = f"the gradient is {_times_mean(explanation.factor)}"
    if rates is None:
        return f"{batch}; {held}."
    if rates.scaling == 1:
        return f"{batch}; {held}; the learning rate is {number(rates.same_step)}."
    return (
        f"{batch}, {times(rates.scaling)} times the known one; {held}; learning rates from "
        f"{number(min(rates.same_step, rates.linear or Fraction(rates.square_root)))} to "
        f"{number(max(rates.same_step, rates.linear or Fraction(rates.square_root)))}, by what "
        "they are to keep."
    )


def _times_mean(factor: Fraction) -> str:
    whole = "the big batch's mean gradient"
    return whole if factor == 1 else f"{times(factor)} times {whole}"


def _setup_sentences(setup: Setup) -> Iterator[str]:
    processes, gpus = setup.processes, setup.ranks_per_node
    nodes = f"{setup.nodes} {plural(setup.nodes, 'node')}"
    ranks = f"{processes} {plural(processes, 'rank')} on {nodes}"
    replicas = f"{gpus} {plural(gpus, 'replica')}"
    yield {
        "ddp": f"DistributedDataParallel, {ranks}, one process each.",
        "all-reduce-sum": f"your own all_reduce of the gradients, a sum, {ranks}.",
        "data-parallel": f"nn.DataParallel, one process and {replicas}; one loss over the "
        "gathered outputs.",
        "data-parallel-loss-inside": f"nn.DataParallel, one process and {replicas}, each with a "
        "loss of its own; you take the mean of these.",
        "hybrid": f"one process a node, {nodes}, with {replicas} each: DataParallel inside, one "
        "loss over the gathered outputs; DDP between the processes.",
        "none": "one process on one device.",
    }[setup.parallelism]
    if setup.replicas > 1:
        yield from _replica_sentences(setup)


def _replica_sentences(setup: Setup) -> Iterator[str]:
    sizes = setup.replica_sizes
    parts = " + ".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{sizes[0]} each"
    over = f"{len(sizes)} {plural(len(sizes), 'replica')}, {parts}"
    yield f"The batch of {setup.batch} is per process, and DataParallel splits it over {over}."
    idle = setup.replicas - len(sizes)
    if idle:
        verb = "is" if idle == 1 else "are"
        yield (
            f"{idle} {plural(idle, 'replica')} {verb} left idle: it deals equal parts of "
            f"{sizes[0]} until nothing is left."
        )


def _batch_sentences(explanation: Explanation) -> Iterator[str]:
    setup = explanation.setup
    factors = [f"{setup.batch} {plural(setup.batch, 'example')}"]
    who = "processes" if setup.parallelism == "hybrid" else "ranks"
    if setup.processes > 1:
        factors.append(f"{setup.processes} {who}")
    if setup.accumulation > 1:
        factors.append(f"{setup.accumulation} micro-batches")
    yield f"{explanation.effective_batch} examples a step = {' x '.join(factors)}."


def _gradient_sentences(explanation: Explanation) -> Iterator[str]:
    batch, factor = explanation.effective_batch, explanation.factor
    yield (
        f"let g be that of the mean loss over these {batch} examples, as one device finds it in "
        "one batch."
    )
    divide = "; ".join(divisor.what for divisor in explanation.divisors)
    yield f"What divides: {divide}."
    if explanation.setup.loss == "token-mean":
        yield from _token_sentences(explanation)
        return
    if not explanation.is_multiple:
        shares = ", ".join(
            f"{times(share)} in a replica of {size}"
            for size, share in dict.fromkeys(explanation.shares)
        )
        yield (
            f"So the gradient is no multiple of g: an example counts {shares} (1 = as often as in "
            "the big batch)."
        )
        return
    together = batch / factor
    product = " x ".join(str(one.number) for one in explanation.divisors if one.number != 1)
    product = f"{product} = " if " x " in product else ""
    yield f"Together by {product}{number(together)}, where the mean over the big batch divides by {batch}."
    who = "every rank holds" if explanation.setup.processes > 1 else "the gradient is"
    ratio = "" if factor == 1 else f"{batch} / {number(together)} = "
    yield f"So {who} {ratio}{of_g(factor)}."
    if explanation.setup.loss == "sum":
        yield (
            'This is of a loss that adds up one value an example. MSELoss(reduction="sum") adds up '
            "every element of it as well, where its mean divides by them: then multiply by "
            "the elements of an example."
        )


def _token_sentences(explanation: Explanation) -> Iterator[str]:
    setup, factor = explanation.setup, explanation.factor
    if explanation.is_multiple:
        yield (
            "There is one loss, and it sees all tokens of the step. So the gradient is that of the "
            "big batch: g."
        )
        return
    losses = len(setup.loss_sizes) * setup.accumulation * setup.processes
    yield (
        f"So the gradient is no multiple of g where counts differ: {losses} means are taken in a "
        "step, and each weighs the same, however many tokens it has. A token in a short one counts "
        "more."
    )
    yield f"With as many tokens in each it would be {of_g(factor)}; so much it is on average."
