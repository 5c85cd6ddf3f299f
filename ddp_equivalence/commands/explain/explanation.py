"""Explains a setup: its gradient by a table of divisions, the learning rates, and the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import sqrt

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.explain.setup import SAYS, Setup
from ddp_equivalence.report.text import plural, wrapped


@dataclass(frozen=True)
class LocalLoss:
    """One loss of one step on one process.

    ``terms``: its examples, or the tokens that it counts. ``of_process`` and ``of_all``: those of
    all losses of its process and of all processes in this step. ``beside``: the losses of its
    micro-batch. ``micro_batches``: those of this step.
    """

    terms: int
    of_process: int
    of_all: int
    beside: int
    micro_batches: int


def divisions(setup: Setup, loss: LocalLoss) -> Iterator[tuple[str, Fraction | int]]:
    """Each division on the way from the terms of a loss to the gradient that every rank holds.

    Yields a phrase, in which {by} stands for what it does, and the number that it divides by.
    """
    whose = {"data-parallel-loss-inside": "each replica's", "hybrid": "each process's"}
    who = whose.get(setup.parallelism, "each rank's" if setup.processes > 1 else "the")
    counted, of = {
        "micro-batch": (loss.terms, "its own tokens"),
        "step": (loss.of_process, "the tokens of all its micro-batches"),
        "all-ranks": (loss.of_all, "all tokens of the step"),
    }[setup.tokens_over]
    if setup.loss == "token-mean":
        yield f"{who} loss divides by {of}", counted
    elif setup.loss == "sum":
        yield f"{who} summed loss {{by}}", 1
    else:
        yield f"{who} mean loss {{by}}", counted
    if setup.loss_factor != 1:
        yield f"it is multiplied by {times(setup.loss_factor)}", 1 / setup.loss_factor
    if setup.parallelism == "data-parallel-loss-inside":
        yield "the mean over the replicas' losses {by}", loss.beside
    if setup.accumulation > 1:
        in_each_step = setup.like == "hf-trainer" and setup.loss != "token-mean"
        by = loss.micro_batches if in_each_step else setup.accumulation
        yield "accumulation {by}", by if setup.accumulation_divided else 1
    if setup.processes > 1:
        what = "DDP's average" if setup.framework_divisor > 1 else "all_reduce"
        yield f"{what} {{by}}", setup.framework_divisor


def counts_of(setup: Setup, loss: LocalLoss) -> Fraction:
    """How often each term of this loss counts in the gradient; in one big batch it is once."""
    divisor = Fraction(1)
    for _, by in divisions(setup, loss):
        divisor *= by
    return loss.of_all / divisor


def losses_of(setup: Setup, micro_batches: list[tuple[int, int]]) -> list[LocalLoss]:
    """The losses of one step of a process, with their examples as ``terms``.

    ``micro_batches``: how many, and of how many examples. A mean over tokens is treated as if every
    example had equally many.
    """
    examples = sum(many * batch for many, batch in micro_batches)
    number = sum(many for many, _ in micro_batches)
    sizes = [setup.loss_sizes(batch) for many, batch in micro_batches if many]
    return [
        LocalLoss(size, examples, examples * setup.processes, len(of_batch), number)
        for of_batch in sizes
        for size in of_batch
    ]


# The learning rates that follow from one that worked, and what each of them keeps.

SMALLEST_BETA = Fraction(1, 2)
"""The square-root rule for Adam is derived for means of many gradients. A beta below this one makes
a mean of fewer than two, and the known betas then keep as much."""


@dataclass(frozen=True)
class LearningRates:
    """The learning rates for a setup's gradient.

    ``scaling``: the effective batch divided by the known one. ``relative``: the setup's gradient as
    a multiple of that of the known loss. ``same_step``, ``linear``, ``square_root``: see
    RATE_RULES. ``betas`` and ``eps``: those of Adam with the square-root rate; None with SGD.
    """

    scaling: Fraction
    relative: Fraction
    same_step: Fraction
    linear: Fraction
    square_root: float
    betas: tuple[Fraction, Fraction] | None = None
    eps: float | None = None

    @property
    def start(self) -> float:
        """The rate to start with, which people found to carry over best to another batch."""
        return float(self.linear) if self.betas is None else self.square_root


RATE_RULES = {
    "sgd": (
        (
            "linear",
            "the way of the weights in an epoch, if the gradient hardly changes meanwhile "
            "(Goyal et al. 2017, arXiv 1706.02677, who reach it over the first epochs, and lost "
            "accuracy beyond a batch of 8192)",
        ),
        ("same_step", "the length of a step for the same mean gradient"),
        (
            "square_root",
            "the variance of an update, which comes from drawing examples (Krizhevsky "
            "2014, arXiv 1404.5997; Hoffer et al. 2017, arXiv 1705.08741)",
        ),
    ),
    "adam": (
        (
            "square_root",
            "the way of the weights and its noise, if noise is most of the gradient "
            "(Malladi et al. 2022, arXiv 2205.10287)",
        ),
        (
            "same_step",
            "the length of a step, if noise is most of the gradient with both batches, "
            "or hardly any of it",
        ),
        (
            "linear",
            "the way of the weights in an epoch, if the gradient is much larger than its noise",
        ),
    ),
}
"""By optimizer: the learning rates, and what each of them keeps. The first is to start with."""


def learning_rates_of(setup: Setup, factor: Fraction) -> LearningRates | None:
    """The learning rates for a gradient of ``factor`` x g; None if none is known to be good.

    With the square-root rule Adam's betas are 1 - k (1 - beta) and its eps is 1e-8 / sqrt(k), where
    k is the ratio of the batches. The known betas stay if one is below SMALLEST_BETA.
    """
    known = setup.known_good
    if known is None:
        return None
    scaling, relative = Fraction(setup.effective_batch, known.batch), factor / known.factor
    base, betas, eps = known.learning_rate / relative, None, None
    if setup.is_adam:
        base = known.learning_rate  # a constant factor cancels in m / (sqrt(v) + eps)
        first, second = (1 - scaling * (1 - beta) for beta in setup.betas)
        in_reach = min(first, second, *setup.betas) >= SMALLEST_BETA
        betas, eps = (first, second) if in_reach else setup.betas, 1e-8 / sqrt(scaling)
    root = float(base) * sqrt(scaling)
    return LearningRates(scaling, relative, base, base * scaling, root, betas, eps)


# An explanation, and how it is worked out.


@dataclass(frozen=True)
class Explanation:
    """The results for a setup. All numbers are exact except square roots.

    Let g be the gradient of the mean loss over the examples of one step. ``factor``: every rank
    holds factor x g. If ``is_multiple`` is False, the examples (or tokens) count unequally, and
    they count ``factor`` times on average.
    ``shares``: for each loss of one micro-batch its examples, and how often each of them counts.
    ``mended``: the setup after the change that the text advises, explained; None if no change is
    needed. ``learning_rates``: those with that change; None if none is known to be good.
    """

    setup: Setup
    factor: Fraction
    is_multiple: bool
    shares: tuple[tuple[int, Fraction], ...]
    mended: Explanation | None
    learning_rates: LearningRates | None

    @property
    def relative(self) -> Fraction:
        """The gradient after the advised change, as a multiple of that of the known loss."""
        if self.learning_rates is not None:
            return self.learning_rates.relative
        return (self.mended or self).factor

    def __str__(self) -> str:
        return explanation_text(self, full=True)


def explain(setup: Setup) -> Explanation:
    """Work out what the setup computes.

    Raises BadCase for anything but a Setup. One that cannot be right is refused when it is made.
    """
    if not isinstance(setup, Setup):
        raise BadCase("setup", setup, "a Setup, such as Setup(batch=4)")
    losses = losses_of(setup, [(setup.accumulation, setup.batch)])
    shares = [(one.terms, counts_of(setup, one)) for one in losses]
    counts = {count for _, count in shares}
    all_losses = len(losses) * setup.accumulation * setup.processes
    means = {"micro-batch": all_losses, "step": setup.processes, "all-ranks": 1}
    counted_apart = setup.loss == "token-mean" and means[setup.tokens_over] > 1
    is_multiple = len(counts) == 1 and not counted_apart
    factor = sum((size * count for size, count in shares), Fraction(0)) / setup.batch
    mended = None if is_multiple else explain(mended_setup(setup))
    return Explanation(
        setup=setup,
        factor=factor,
        is_multiple=is_multiple,
        shares=tuple(shares),
        mended=mended,
        learning_rates=learning_rates_of(setup, mended.factor if mended else factor),
    )


def mended_setup(setup: Setup) -> Setup:
    """The setup with the change that makes its gradient a multiple of the big batch's.

    Uneven replicas take one loss over their gathered outputs. Tokens are counted over all ranks and
    micro-batches, and the loss is multiplied by what else divides it.
    """
    if setup.loss != "token-mean":
        return replace(setup, parallelism="data-parallel")
    own = setup.like in ("accelerate", "lightning") and setup.accumulation > 1
    undone = setup.framework_divisor * (setup.accumulation if own else 1)
    return replace(
        setup,
        parallelism="data-parallel" if "inside" in setup.parallelism else setup.parallelism,
        tokens_over="all-ranks",
        loss_times=str(undone),
        accumulation_divided=own if setup.accumulation > 1 else None,
    )


def last_step_counts(explanation: Explanation, divisor: int = 0) -> set[Fraction]:
    """How often examples count in the last step of an epoch, 1 being right, with the learning rate
    for a whole step and the advised change.

    ``divisor``: by what accumulation divides in that step; 0 for what the setup does by itself.
    """
    epoch, final = explanation.setup.epoch, explanation.mended or explanation
    if epoch is None:
        return {Fraction(1)}
    setup, known, last = final.setup, explanation.setup.known_good, epoch.last_step
    full = (epoch.rest or setup.accumulation) - 1
    sums = setup.loss == "sum" if known is None else known.loss == "sum"
    right = final.factor * (Fraction(last, setup.effective_batch) if sums else 1)
    losses = losses_of(setup, [(full, setup.batch), (1, epoch.last_batch)])
    undone = Fraction(setup.accumulation, divisor) if divisor else 1
    return {counts_of(setup, one) * undone / right for one in losses}


# Numbers as people read and paste them, and the explanation in words.


def number(value: Fraction | float) -> str:
    """The number as text, such as 12, 0.01 or 0.02828: exact where six digits are enough."""
    text = f"{float(value):.6g}"
    if not isinstance(value, Fraction) or Fraction(text) != value:
        text = f"{float(value):.4g}"
    if isinstance(value, Fraction) and value.denominator == 1 and value < 10**15:
        text = str(value)
    return re.sub(r"e\+?(-?)0*", r"e\1", text)


def times(value: Fraction | float) -> str:
    """A multiple as text, such as ``4`` or ``3.75``; below 1 or with endless decimals ``5/3``."""
    exact = isinstance(value, Fraction) and Fraction(number(value)) == value and value >= 1
    if not isinstance(value, Fraction) or exact:
        return number(value)
    return str(value) if value.numerator == 1 or value.denominator <= 1000 else number(value)


def as_many(value: Fraction) -> str:
    """How many times as many, as text: ``4 times`` or ``1/4 of``."""
    return f"{times(value)} times" if value >= 1 else f"{times(value)} of"


def of_big_batch(factor: Fraction) -> str:
    """A multiple of the big batch's gradient as text."""
    return "the big batch's" if factor == 1 else f"{as_many(factor)} the big batch's"


SEE_A_FACTOR = {
    "sgd": "weight_decay and clipping's max_norm",
    "adam": "weight_decay, clipping's max_norm and eps",
    "adamw": "clipping's max_norm and eps",
}
"""The settings that a factor on the gradient is compared with, by optimizer."""


def explanation_text(explanation: Explanation, full: bool = False) -> str:
    """The answer in a few lines; ``full``: also how it follows, step by step."""
    setup, lines = explanation.setup, list[str]()
    for sentence in (
        _batch_and_gradient(explanation),
        *_mend(explanation),
        *_learning_rate(explanation),
        *_epoch(explanation),
    ):
        lines += wrapped(sentence, "")
    only = ""
    if max(setup.replicas, setup.processes, setup.accumulation) > 1:
        only = "Not exact with batch norm, dropout, class weights or contrastive losses. "
    if not full:
        return "\n".join([*lines, *wrapped(f"{only}More: --full.", "")]) + "\n"
    for sentence in (only, *_how_it_follows(explanation)):
        lines += wrapped(sentence, "  ")
    return "\n".join(lines) + "\n"


def _batch_and_gradient(explanation: Explanation) -> str:
    setup, known = explanation.setup, explanation.setup.known_good
    factors = [str(setup.batch)]
    if setup.processes > 1:
        factors.append(f"{setup.processes} {'ranks' if setup.replicas == 1 else 'processes'}")
    if setup.accumulation > 1:
        factors.append(f"{setup.accumulation} micro-batches")
    batch = f"Effective batch {setup.effective_batch}"
    batch += f" = {' x '.join(factors)}" if len(factors) > 1 else ""
    if known is not None:
        same = known.batch == setup.effective_batch
        batch += ", the known one" if same else f"; known: {known.batch}"
    if not explanation.is_multiple:
        if setup.loss == "token-mean":
            return f"{batch}. The gradient is not the big batch's where counts of tokens differ."
        counts = " or ".join(times(count) for count in sorted({c for _, c in explanation.shares}))
        return (
            f"{batch}. The gradient is no multiple of the big batch's: examples count {counts} "
            "times."
        )
    factor, is_sum = explanation.factor, "sum" in (setup.loss, known and known.loss)
    gradient = of_big_batch(factor)
    if is_sum:
        total = known.batch if known and known.loss == "sum" else setup.effective_batch
        of_sum = factor / total
        gradient += f" with a mean loss, {'that' if of_sum == 1 else as_many(of_sum) + ' that'}"
        gradient += f" of a summed loss over {total}"
    elif setup.like == "hf-trainer" and setup.tokens_over == "all-ranks":
        gradient += " (language model, transformers from 4.54 on)"
    return f"{batch}. The gradient is {gradient}."


def _mend(explanation: Explanation) -> Iterator[str]:
    """How to turn a gradient that is no multiple of g into a multiple of g."""
    setup, mended = explanation.setup, explanation.mended
    if mended is None:
        return
    if setup.loss != "token-mean":
        yield (
            f"To mend it, make the batch a multiple of {setup.replicas}, or take one loss over the "
            f"gathered outputs (data-parallel): then the gradient is {of_big_batch(mended.factor)}."
        )
    elif setup.like == "hf-trainer":
        yield (
            "To mend it, take transformers 4.54 or later, a model whose loss takes "
            "num_items_in_batch, and average_tokens_across_devices=True, and do not multiply the "
            "loss."
        )
    else:
        reduced = ", with all_reduce (sum) over the ranks" if setup.processes > 1 else ""
        by = f" x {mended.setup.loss_times}" if mended.setup.loss_times != "1" else ""
        yield (
            "To mend it, count the tokens of all micro-batches before the first "
            f'backward{reduced}; call it T. Then take the loss with reduction="sum"{by} / T, and '
            "change it in no other way. That gives the big batch's gradient."
        )


def _learning_rate(explanation: Explanation) -> Iterator[str]:
    """The learning rate, and the settings beside it."""
    rates, setup, factor = explanation.learning_rates, explanation.setup, explanation.relative
    change = "With that change, t" if explanation.mended else "T"
    see, beside = SEE_A_FACTOR[setup.optimizer], ""
    if factor != 1:
        beside = f", if you also multiply {see} by {times(factor)}"
    by = Fraction(1) if setup.is_adam else 1 / factor
    if rates is None:
        rate = "" if by == 1 else f", times {times(by)}"
        one = "that of one device with a mean loss and this batch"
        yield f"{change}he learning rate is {one}{rate}{beside}."
        keep = "that of one device"
    elif rates.scaling == 1:
        yield (
            f"{change}he learning rate is {number(rates.same_step)}: every update of "
            f"{setup.effective_batch} examples is then the same as on one device{beside}."
        )
        keep = number(rates.same_step / by)
    else:
        yield _to_start_with(explanation, rates)
        keep = number(rates.start / float(by))
        decay = f"Multiply weight_decay by {number(sqrt(rates.scaling))}"
        if factor != 1 and setup.is_adam:
            yield f"Multiply {see} by {times(factor)}, or the loss by {times(1 / factor)}."
        elif factor != 1:
            yield f"Keep momentum, and multiply {see} by {times(factor)}."
        elif not setup.is_adam:
            decay = "Keep momentum and weight_decay"
        if setup.optimizer == "adamw" or decay.startswith("Keep"):
            yield f"{decay}: an epoch then decays the weights as much as before."
        if setup.is_adam:
            return
    if factor != 1:
        take = "" if setup.is_adam else f" take {keep},"
        yield f"Or multiply the loss by {times(1 / factor)},{take} and change nothing else."


def _to_start_with(explanation: Explanation, rates: LearningRates) -> str:
    setup, root = explanation.setup, number(sqrt(rates.scaling))
    begin = "With that change and" if explanation.mended else "With"
    if rates.betas is not None and rates.eps is not None:
        whose = "your " if rates.betas == setup.betas else ""
        # What counts of a beta is its distance from 1, which is rounded.
        rounded = (1 - float(number(1 - beta)) for beta in rates.betas)
        betas = ", ".join(f"{beta:.12f}".rstrip("0").rstrip(".") for beta in rounded)
        name = "AdamW" if setup.optimizer == "adamw" else "Adam"
        return (
            f"{begin} {name} start with {number(rates.square_root)} (square root, x {root}), "
            f"{whose}betas ({betas}) and eps {number(rates.eps)}: where noise is most of the "
            "gradient, weights move and scatter as before. "
            f"{number(rates.same_step)} then keeps a step's length."
        )
    divided = f", x {times(1 / rates.relative)} for the gradient" if rates.relative != 1 else ""
    first = ", reached over the first epochs" if rates.scaling > 1 else ""
    return (
        f"{begin} SGD start with {number(rates.linear)} (linear, x {times(rates.scaling)}"
        f"{divided}){first}: an epoch then moves the weights about as far as before. "
        f"{number(rates.same_step)} keeps a step's length, {number(rates.square_root)} its noise."
    )


def _epoch(explanation: Explanation) -> Iterator[str]:
    """The steps of an epoch, and where they are not those of one device."""
    setup = explanation.setup
    epoch = setup.epoch
    if epoch is None:
        return
    steps = f"An epoch has {epoch.steps} {plural(epoch.steps, 'step')}"
    if epoch.rest:
        steps += " with the shorter last one" + ("" if setup.like else ", if the loop takes it")
    if epoch.steps == 1 and epoch.last_step < setup.effective_batch:
        steps += f"; the largest is of {epoch.last_step} examples"
    if epoch.repeated:
        examples = plural(epoch.repeated, "example")
        steps += f"; it repeats {epoch.repeated} {examples} at its end"
    yield f"{steps}."
    counts = last_step_counts(explanation)
    if counts != {1}:
        largest, smallest = times(max(counts)), times(min(counts))
        said = largest if largest == smallest else f"{smallest} to {largest}"
        mends = epoch.rest and setup.accumulation_divided and not setup.like
        if mends and last_step_counts(explanation, epoch.rest) == {1}:
            yield f"In its last step divide by {epoch.rest}: else examples count {said} times."
        else:
            yield f"In its last step, of {epoch.last_step}, examples count {said} times."


def _how_it_follows(explanation: Explanation) -> Iterator[str]:
    """Every division from the loss to the gradient, and what each learning rate keeps."""
    setup, rates = explanation.setup, explanation.learning_rates
    tokens = "all tokens of " if setup.loss == "token-mean" else ""
    batch = setup.effective_batch
    yield f"g is the gradient of the mean loss over {tokens}{batch} examples on one device."
    phrases, losses = [], losses_of(setup, [(setup.accumulation, setup.batch)])
    for same in zip(*(divisions(setup, loss) for loss in losses), strict=True):
        found = sorted({Fraction(divisor) for _, divisor in same})
        by = f"divides by {' or '.join(map(times, found))}"
        phrases.append(same[0][0].format(by="does not divide" if found == [1] else by))
    says = "; ".join(phrases)
    yield f"{says[0].upper()}{says[1:]}."
    who = "every rank holds" if setup.processes > 1 else "the gradient is"
    on_average = "" if explanation.is_multiple else ", on average"
    divided = times(batch / explanation.factor)
    yield f"So {who} {batch} / {divided} = {times(explanation.factor)} g{on_average}."
    if setup.loss == "sum":
        yield 'nn.MSELoss(reduction="sum") also adds up the elements of each example.'
    if setup.like is not None:
        yield SAYS[setup.like].format(setup=setup)
    if rates is not None and rates.scaling != 1:
        yield "No learning rate trains exactly the same at another batch; each keeps one thing:"
        for name, keeps in RATE_RULES["adam" if setup.is_adam else "sgd"]:
            rate = number(getattr(rates, name))
            yield f"  {rate} ({name.replace('_', ' ')}) keeps {keeps}."
