"""What a setup computes: gradients, learning rates, and epochs, as data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from fractions import Fraction
from math import sqrt
from typing import Any, Literal, get_args

from ddp_equivalence.case.errors import BadCase

# Explanation: what a setup computes, as data.


@dataclass(frozen=True)
class Divisor:
    """One division on the way from the losses to the gradient.

    ``what`` is a phrase that says who divides and by what. ``number``: the divisor; None if it is
    not the same everywhere.
    """

    what: str
    number: Fraction | int | None


@dataclass(frozen=True)
class Explanation:
    """What a setup computes. ``str()`` gives the text. All numbers are exact except square roots.

    Let g be the gradient of the mean loss over the ``effective_batch`` examples of one step. The
    text calls g the gradient of their summed loss where that is what one device computes.

    ``divisors``: what divides the summed loss, in this order. ``factor``: every rank holds
    factor x g. If ``is_multiple`` is False, the examples (or tokens) count unequally, and they
    count ``factor`` times on average. ``mended_factor``: the factor after the change that the text
    advises; it equals ``factor`` if no change is needed. The advised change leaves accumulation as
    it is, unless it counts the tokens of all micro-batches. ``shares``: for each loss of one
    micro-batch its number of examples and how often each of them counts; empty if the sizes of the
    losses do not make the examples count unequally. ``learning_rates``: the learning rates for a
    gradient of ``mended_factor`` x g; None if no known good one was given. ``epoch``: None if the
    dataset's size was not given. ``render``: writes the text.
    """

    setup: Setup
    effective_batch: int
    divisors: tuple[Divisor, ...]
    factor: Fraction
    is_multiple: bool
    mended_factor: Fraction
    shares: tuple[tuple[int, Fraction], ...]
    learning_rates: LearningRates | None
    epoch: Epoch | None
    render: Callable[[Explanation], str] = field(repr=False, compare=False)

    @property
    def compares_sums(self) -> bool:
        """True if g in the text is the gradient of the summed loss over the effective batch.

        It is if the loss that is known to be good was a sum over as many examples. Without one, it
        is if the loss of this setup is a sum, unless that is multiplied by less than 1, as where it
        is divided by a count.
        """
        known = self.setup.known_good
        if known is None:
            return self.setup.loss == "sum" and self.setup.loss_times.number >= 1
        return known.loss == "sum" and known.batch == self.effective_batch

    @property
    def unit(self) -> int:
        """What the text calls g, as a multiple of the gradient of the mean loss."""
        return self.effective_batch if self.compares_sums else 1

    def __str__(self) -> str:
        return self.render(self)


# How many optimizer steps an epoch has, and how many examples are repeated or left out.


@dataclass(frozen=True)
class Epoch:
    """One pass over the dataset.

    ``examples_each``: the examples of a rank. ``micro_batches``: the number of its batches; the
    last one has ``last_batch`` examples. ``full_steps``: the optimizer steps that accumulate all
    their micro-batches. ``rest``: the micro-batches that are left for a shorter last step.
    ``largest_step``: the examples of the largest step, over all ranks, and ``last_step`` those of
    the last one. ``repeated``: how many more examples the ranks get than there are, so that all
    ranks get equally many. If there are fewer examples than ranks, some are repeated more than
    once. ``dropped``: the examples that no rank sees.
    """

    examples_each: int
    micro_batches: int
    last_batch: int
    full_steps: int
    rest: int
    largest_step: int
    last_step: int
    repeated: int
    dropped: int

    @property
    def steps(self) -> int:
        """The optimizer steps, if the loop also takes a shorter last step."""
        return self.full_steps + bool(self.rest)


def epoch_of(setup: Setup) -> Epoch | None:
    """The epoch of DistributedSampler(shuffle=True) and DataLoader(batch_size, drop_last).

    None if the size of the dataset is not known. The sampler's own ``drop_last`` is False: it
    appends repeated examples at the end, so the DataLoader drops these first. Accelerate's
    ``even_batches`` deals whole batches in turn instead, and fills up the last ones.
    """
    each = setup.examples_per_process
    if setup.examples is None or each is None:
        return None
    whole, remainder = divmod(each, setup.batch)
    short = remainder > 0 and not setup.drop_last
    micro_batches = whole + short
    full_steps, rest = divmod(micro_batches, setup.accumulation)
    drops = remainder > 0 and setup.drop_last
    seen = whole * setup.batch * setup.processes
    last_batch = remainder if short else setup.batch
    of_last = ((rest or setup.accumulation) - 1) * setup.batch + last_batch
    first_is_last = full_steps + bool(rest) == 1
    return Epoch(
        examples_each=each,
        micro_batches=micro_batches,
        last_batch=last_batch,
        full_steps=full_steps,
        rest=rest,
        largest_step=of_last * setup.processes if first_is_last else setup.effective_batch,
        last_step=of_last * setup.processes,
        repeated=0 if drops else max(0, each * setup.processes - setup.examples),
        dropped=max(0, setup.examples - seen) if setup.drop_last else 0,
    )


# The learning rates that follow from one that worked, and what each of them keeps.

ADAM_EPS = Fraction(1, 10**8)
"""The default of torch.optim.Adam."""

SMALLEST_BETA = Fraction(1, 2)
"""The square-root rule is used for betas from here on: a mean is of 1 / (1 - beta) gradients.

The rule is derived for means of many gradients. Elsewhere the known betas keep as much: a test
trains the stand-in with them at eight times the batch.
"""


@dataclass(frozen=True)
class AdamSettings:
    """The betas and eps that the square-root rule for adaptive methods makes of those before.

    Source: Malladi et al. 2022, arXiv 2205.10287. With kappa = batch / known batch they are
    1 - kappa (1 - beta) and eps / sqrt(kappa), for the learning rate lr sqrt(kappa).
    ``rule_betas``: these betas, which may be 0 or below. ``betas``: those to use, which are the
    known ones unless all of them are at least SMALLEST_BETA. ``eps``: the value for a gradient
    without an additional factor.
    """

    rule_betas: tuple[Fraction, Fraction]
    betas: tuple[Fraction, Fraction]
    eps: float

    @property
    def in_reach(self) -> bool:
        """True if the betas to use are those of the rule."""
        return self.betas == self.rule_betas


@dataclass(frozen=True)
class LearningRates:
    """The learning rates for a setup's gradient.

    ``scaling``: the effective batch divided by the known batch. ``relative``: the setup's gradient
    as a multiple of the gradient that the loss of the known good training gives. ``same_step``
    keeps the length of the step for the same mean gradient; at the known batch it keeps every
    update. ``linear`` keeps the update per example; with Adam only if the gradient has little
    noise. ``square_root`` keeps the variance of the update. ``adam``: Adam's other settings under
    the square-root rule.
    """

    scaling: Fraction
    relative: Fraction
    same_step: Fraction
    linear: Fraction
    square_root: float
    adam: AdamSettings | None

    @property
    def names_eps(self) -> bool:
        """True if the square-root rule gives Adam an eps: at another batch than the known one."""
        return self.scaling != 1 and self.adam is not None


def learning_rates_of(setup: Setup, factor: Fraction) -> LearningRates | None:
    """The learning rates for a gradient of ``factor`` x g; None if none is known to be good."""
    known = setup.known_good
    if known is None:
        return None
    scaling = Fraction(setup.effective_batch, known.batch)
    relative = factor / known.factor
    if setup.is_adam:  # a constant factor cancels in m / (sqrt(v) + eps)
        base, adam = known.learning_rate, _adam_settings(scaling, setup.betas)
    else:
        base, adam = known.learning_rate / relative, None
    square_root = float(base) * sqrt(scaling)
    return LearningRates(scaling, relative, base, base * scaling, square_root, adam)


def _adam_settings(scaling: Fraction, betas: tuple[Fraction, Fraction]) -> AdamSettings:
    first, second = betas
    by_rule = 1 - scaling * (1 - first), 1 - scaling * (1 - second)
    eps = float(ADAM_EPS) / sqrt(scaling)
    in_reach = min(*by_rule, *betas) >= SMALLEST_BETA
    return AdamSettings(by_rule, by_rule if in_reach else betas, eps)


# KnownGood: a batch and learning rate that worked on one device. Checks of counts and choices.

KNOWN_GOOD = re.compile(
    r"\s*(?P<batch>\d{1,30})\s*@\s*(?P<rate>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?)\s*", re.ASCII
)
"""Python itself also reads 1_0 as a number, which is a typing error here."""

LARGEST_KNOWN = 10**12
"""The largest count accepted: a larger one is a typing error."""
SLOWEST, FASTEST = Fraction(1, 10**30), Fraction(10**30)
"""The smallest and the largest learning rate accepted. Others are typing errors, and products of
them may not fit a float."""


@dataclass(frozen=True)
class KnownGood:
    """The effective ``batch`` and ``learning_rate`` that worked on one device.

    ``loss``: the reduction of the loss over that batch. Raises BadCase for a field that cannot be
    right.
    """

    batch: int
    learning_rate: Fraction
    loss: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        check_count("known_good", self.batch)
        rate = self.learning_rate
        if not isinstance(rate, Fraction) or not SLOWEST <= rate <= FASTEST:
            raise BadCase("known_good", rate, "a learning rate from 1e-30 to 1e30, as a Fraction")
        check_choice("known_loss", self.loss, ("mean", "sum"))

    @classmethod
    def read(cls, text: str, loss: Literal["mean", "sum"] = "mean") -> KnownGood:
        """Read ``BATCH@LR``, such as ``16@0.01``. Raises BadCase for anything else."""
        right = (
            "BATCH@LR with a whole batch from 1 and a learning rate from 1e-30 to 1e30, such as "
            "16@0.01"
        )
        found = KNOWN_GOOD.fullmatch(text)
        if found is None:
            last, _, first = text.partition("@")
            if KNOWN_GOOD.fullmatch(f"{first}@{last}"):
                right = f"the batch first, {first}@{last}"
            raise BadCase("known_good", text, right)
        batch, rate = int(found["batch"]), float(found["rate"])
        if not 1 <= batch <= LARGEST_KNOWN or not 1e-30 <= rate <= 1e30:
            raise BadCase("known_good", text, right)
        return cls(batch, Fraction(found["rate"]), loss)

    @property
    def factor(self) -> Fraction:
        """The gradient of the loss that worked, as a multiple of the gradient of the mean loss."""
        return Fraction(self.batch if self.loss == "sum" else 1)


def check_count(field: str, value: object, most: int = LARGEST_KNOWN) -> None:
    """Raises BadCase unless ``value`` is a whole number from 1 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        too_large = isinstance(value, int) and value > most
        limit = f" to {most}" if too_large or most < LARGEST_KNOWN else ""
        raise BadCase(field, value, f"a whole number from 1{limit}")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises BadCase unless ``value`` is one of the choices."""
    if value not in choices:
        raise BadCase(field, value, f"one of {', '.join(choices)}")


# The learning rate to start with where the batch has changed, and what goes with it.


@dataclass(frozen=True)
class StartingPoint:
    """``rate``: the learning rate. ``how``: the rule that gives it, and how to use it.

    ``why``: what it keeps. ``others``: what the other rates keep. ``beside``: what to do about
    other settings, so that an epoch decays the weights as much as before; "" if nothing.
    """

    rate: float
    how: str
    why: str
    others: str
    beside: str

    @property
    def as_sentence(self) -> str:
        """``Start with 0.4 (linear, x 4): ...``."""
        sentence = f"Start with {number(self.rate)} {self.how}: {self.why}. {self.beside_with_why}"
        return sentence.rstrip()

    @property
    def beside_with_why(self) -> str:
        """What to do about other settings, as a sentence; "" if nothing."""
        if not self.beside:
            return ""
        return f"{self.beside}: an epoch then decays the weights as much as before."


LARGEST_BATCH = 8192
"""The batch up to which Goyal et al. found linear scaling to keep the accuracy of ResNet-50 on
ImageNet (their abstract)."""


def starting_point(explanation: Explanation, rates: LearningRates) -> StartingPoint:
    """The learning rate that people found to carry over best to another batch, by optimizer.

    Sources: for SGD the linear rule of Goyal et al. 2017, arXiv 1706.02677, which keeps momentum
    and weight decay; for Adam the square-root rule of Malladi et al. 2022, arXiv 2205.10287.
    """
    if explanation.setup.is_adam:
        return _for_adam(explanation.setup, rates)
    return _for_sgd(explanation, rates)


def _for_sgd(explanation: Explanation, rates: LearningRates) -> StartingPoint:
    by_then = ", reached over the first epochs" if rates.scaling > 1 else ""
    same, root = number(rates.same_step), number(rates.square_root)
    keep = "Keep momentum and weight_decay"
    if rates.relative != 1:
        keep = "Keep momentum, and multiply weight_decay and clipping's max_norm by "
        keep += times(rates.relative)
    far = divided = ""
    if rates.scaling > 1 and explanation.effective_batch > LARGEST_BATCH:
        far = f" Beyond a batch of {LARGEST_BATCH} Goyal et al. lost accuracy with linear scaling."
    if rates.relative != 1:
        divided = f", {divided_by(rates.relative)} for the gradient"
    return StartingPoint(
        rate=float(rates.linear),
        how=f"(linear, x {times(rates.scaling)}{divided}){by_then}",
        why="an epoch then moves the weights about as far as before",
        others=f"{same} keeps a step's length, {root} its noise.{far}",
        beside=keep,
    )


def _for_adam(setup: Setup, rates: LearningRates) -> StartingPoint:
    assert rates.adam is not None
    root = number(float(rates.scaling) ** 0.5)
    whose = "" if rates.adam.in_reach else "your "
    betas = ", ".join(map(beta, rates.adam.betas))
    return StartingPoint(
        rate=rates.square_root,
        how=f"(square root, x {root}), {whose}betas ({betas}) and eps {number(rates.adam.eps)}",
        why="where noise is most of the gradient, weights move and scatter as before",
        others=f"{number(rates.same_step)} then keeps a step's length.",
        # An epoch decays the weights by rate x weight_decay x steps, and has fewer steps.
        beside=f"Multiply weight_decay by {root}" if setup.optimizer == "adamw" else "",
    )


# An explanation as plain data for machines.
#
# Fractions become floats. The factor is also there as exact text.


def as_data(explanation: Explanation) -> dict[str, Any]:
    """Everything in the explanation, ready for json; ``factor_exact`` stands beside ``factor``.

    ``unit``: the text calls the gradient of the mean loss times this number g. ``start``: the
    learning rate to start with.
    """
    data: dict[str, Any] = _plain_data(asdict(explanation))
    del data["render"]
    data["factor_exact"] = str(explanation.factor)
    data["unit"] = explanation.unit
    rates = explanation.learning_rates
    if rates is not None:
        start = float(rates.same_step)
        if rates.scaling != 1:
            start = starting_point(explanation, rates).rate
        data["learning_rates"]["start"] = start
    if explanation.epoch is not None:
        data["epoch"]["steps"] = explanation.epoch.steps
    return data


def _plain_data(value: Any) -> Any:
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, dict):
        return {name: _plain_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item) for item in value]
    return value


# Numbers in the form in which people read and paste them.


def number(value: Fraction | float) -> str:
    """The number as text, such as 12, 0.01 or 0.02828.

    A Fraction is exact if six significant digits are enough for that, or if it is whole. Every
    other number is rounded to four significant digits.
    """
    exact = f"{float(value):.6g}"
    if isinstance(value, Fraction) and Fraction(exact) == value:
        return _plain(exact)
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value)
    return _plain(f"{float(value):.4g}")


def beta(value: Fraction) -> str:
    """A beta of Adam, such as 0.9999375: what counts of it is its distance from 1.

    That is rounded to four significant digits, so that no beta below 1 becomes 1.
    """
    distance = Decimal(number(1 - value))
    return f"{(1 - distance).normalize():f}"


def _plain(text: str) -> str:
    """The text of a number with a shorter exponent, or with none if the number is below 1e15.

    ``1e-05`` becomes ``1e-5``, and ``1e+06`` becomes ``1000000``.
    """
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    return str(int(float(text))) if 0 < int(exponent) < 15 else f"{mantissa}e{int(exponent)}"


def times(value: Fraction | float) -> str:
    """A multiple as text, such as ``4`` or ``3.75``.

    A multiple below 1 or with endless decimals becomes a fraction: ``5/3``, ``1/4``, ``1/4096``.
    """
    exact = isinstance(value, Fraction) and Fraction(number(value)) == value and value >= 1
    if not isinstance(value, Fraction) or exact:
        return number(value)
    return str(value) if value.numerator == 1 or value.denominator <= 1000 else number(value)


def as_many(value: Fraction) -> str:
    """How many times as many, as text: ``4 times`` or ``1/4 of``."""
    return f"{times(value)} times" if value >= 1 else f"{times(value)} of"


def divided_by(value: Fraction) -> str:
    """A division by ``value`` as text: ``/ 12`` for 12, ``x 16`` for 1/16."""
    return f"/ {times(value)}" if value >= 1 else f"x {times(1 / value)}"


def of_g(factor: Fraction) -> str:
    """A multiple of g as text: ``g``, ``12 g``, ``1/4 g``."""
    return "g" if factor == 1 else f"{times(factor)} g"


# LossFactor: what each loss is multiplied by before backward, such as the world size.

NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,2})?"
LOSS_FACTOR = re.compile(
    rf"(?P<first>{NUMBER}|world-size)(?:/(?P<divisor>{NUMBER}|world-size))?", re.ASCII
)
RIGHT = "a number above 0, world-size, or one divided by the other, such as 4, 1/64 or world-size/8"
SMALLEST, LARGEST = Fraction(1, 10**12), Fraction(10**12)


@dataclass(frozen=True)
class LossFactor:
    """``number`` x the world size to the power of ``power``, from -1 to 2.

    It is 2 where both the user and the trainer multiply by the world size.

    Raises BadCase for a field that cannot be right.
    """

    number: Fraction = Fraction(1)
    power: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.number, Fraction) or not SMALLEST <= self.number <= LARGEST:
            raise BadCase("loss_times", self.number, "a Fraction from 1e-12 to 1e12")
        if self.power not in range(-1, 3):
            raise BadCase("loss_times", self.power, "a power of the world size from -1 to 2")

    @classmethod
    def read(cls, text: str) -> LossFactor:
        """Read ``4``, ``1/64``, ``world-size`` or ``world-size/8``. Raises BadCase."""
        found = LOSS_FACTOR.fullmatch(text.strip())
        if found is None:
            raise BadCase("loss_times", text, RIGHT)
        number, power = Fraction(1), 0
        for word, sign in ((found["first"], 1), (found["divisor"] or "1", -1)):
            if word == "world-size":
                power += sign
            elif not (value := Fraction(word)):
                raise BadCase("loss_times", text, RIGHT)
            else:
                number *= value**sign
        if not SMALLEST <= number <= LARGEST:
            raise BadCase("loss_times", text, f"{RIGHT}, and from 1e-12 to 1e12")
        return cls(number, power)

    def value(self, world_size: int) -> Fraction:
        """The factor with this many processes."""
        return self.number * Fraction(world_size) ** self.power


UNCHANGED = LossFactor()
"""The factor of a loss that is not multiplied by anything."""


# Setup: how somebody trains, in the words of the command line.
#
# A Setup refuses fields that cannot be right.

Loss = Literal["mean", "sum", "token-mean"]
TokensOver = Literal["micro-batch", "step", "all-ranks"]
Parallelism = Literal[
    "ddp", "data-parallel", "data-parallel-loss-inside", "hybrid", "all-reduce-sum", "none"
]
Optimizer = Literal["sgd", "adam", "adamw"]
Sampler = Literal["distributed", "even-batches"]

ADAM_BETAS = (Fraction(9, 10), Fraction(999, 1000))
"""The default of torch.optim.Adam and AdamW."""

MOST_RANKS_A_NODE = 10**5
"""The most ranks on a node. The shares of a batch are listed one by one, so there is a limit."""
ONE_PROCESS = ("data-parallel", "data-parallel-loss-inside", "none")
WITH_REPLICAS = ("data-parallel", "data-parallel-loss-inside", "hybrid")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Which ranks train, on which batches, and with which loss.

    ``batch``: the examples that one process takes for one micro-batch. nn.DataParallel and "hybrid"
    have one process on each node, which splits this batch over replicas on ``ranks_per_node`` GPUs.
    ``accumulation``: the micro-batches of one optimizer step. ``accumulation_divided``: whether the
    loss of each micro-batch is divided by their number; None if there is only one. ``loss``: the
    reduction of each rank's loss. ``loss_times``: what each loss is multiplied by. ``tokens_over``:
    whose tokens a mean over tokens divides by: those of its own micro-batch, of all micro-batches
    of its process, or of those of all ranks. ``parallelism``: "hybrid" is DataParallel inside each
    node and DDP between the nodes; "all-reduce-sum" is the user's own all_reduce, which does not
    divide. ``known_good``: a learning rate that worked on one device. ``examples``: the size of the
    dataset. ``drop_last``: the DataLoader's ``drop_last``. ``sampler``: how the dataset is dealt:
    torch's DistributedSampler, or Accelerate's ``even_batches``, with which all batches are full.
    ``betas``: those of Adam. ``like``: the trainer that ``setup_like`` made it for.

    Raises BadCase for a field that cannot be right or that contradicts another one.
    """

    batch: int
    nodes: int = 1
    ranks_per_node: int = 1
    accumulation: int = 1
    accumulation_divided: bool | None = None
    loss: Loss = "mean"
    loss_times: LossFactor = UNCHANGED
    tokens_over: TokensOver = "micro-batch"
    parallelism: Parallelism = "ddp"
    known_good: KnownGood | None = None
    examples: int | None = None
    drop_last: bool = False
    optimizer: Optimizer = "sgd"
    betas: tuple[Fraction, Fraction] = ADAM_BETAS
    sampler: Sampler = "distributed"
    like: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "nodes", "accumulation"):
            check_count(name, getattr(self, name))
        check_count("ranks_per_node", self.ranks_per_node, MOST_RANKS_A_NODE)
        check_choice("loss", self.loss, get_args(Loss))
        check_choice("parallelism", self.parallelism, get_args(Parallelism))
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        check_choice("tokens_over", self.tokens_over, get_args(TokensOver))
        check_choice("sampler", self.sampler, get_args(Sampler))
        self._check_loss()
        self._check_betas()
        self._check_known_good()
        self._check_processes()
        self._check_accumulation()
        self._check_epoch()

    def _check_loss(self) -> None:
        given: object = self.loss_times
        if not isinstance(given, LossFactor):
            right = "a LossFactor, such as LossFactor.read('world-size')"
            raise BadCase("loss_times", given, right)
        if self.tokens_over != "micro-batch" and self.loss != "token-mean":
            right = "left out, unless the loss is token-mean: only tokens are counted"
            raise BadCase("tokens_over", self.tokens_over, right)

    def _check_betas(self) -> None:
        betas: object = self.betas
        two = isinstance(betas, tuple) and len(betas) == 2
        if not two or not all(isinstance(one, Fraction) and 0 <= one < 1 for one in self.betas):
            raise BadCase("betas", betas, "two Fractions from 0, below 1")
        if self.betas != ADAM_BETAS and not self.is_adam:
            raise BadCase("betas", betas, "left out, unless the optimizer is adam or adamw")

    def _check_known_good(self) -> None:
        known = self.known_good
        if known is None:
            return
        if not isinstance(known, KnownGood):
            raise BadCase("known_good", known, "a KnownGood, such as KnownGood.read('16@0.01')")
        if known.loss == "sum" and self.loss == "token-mean":
            right = (
                "mean: a loss summed over tokens grows with their number, which is not given here. "
                "Multiply that learning rate by the number of tokens of its batch, and give the "
                "product as the learning rate of a mean"
            )
            raise BadCase("known_loss", known.loss, right)

    def _check_processes(self) -> None:
        if self.parallelism in ONE_PROCESS and self.nodes > 1:
            what = "training on one device" if self.parallelism == "none" else "nn.DataParallel"
            right = f"1: {what} is one process; for several use ddp, hybrid or all-reduce-sum"
            raise BadCase("nodes", self.nodes, right)
        if self.parallelism == "none" and self.ranks_per_node > 1:
            right = (
                "1: several ranks without any parallelism are separate trainings; name a "
                "parallelism"
            )
            raise BadCase("ranks_per_node", self.ranks_per_node, right)

    def _check_accumulation(self) -> None:
        divided = self.accumulation_divided
        if self.accumulation == 1 and divided is not None:
            right = "left out: with one micro-batch a step there is no accumulation"
            raise BadCase("accumulation_divided", divided, right)
        if self.accumulation > 1 and not isinstance(divided, bool):
            right = (
                "say whether each micro-batch's loss is divided by "
                f"{self.accumulation} (--accumulation-divided) or not (--accumulation-not-divided)"
            )
            raise BadCase("accumulation_divided", divided, right)

    def _check_epoch(self) -> None:
        if self.examples is None:
            if self.sampler != "distributed" and self.like is None:
                right = "left out, unless the dataset's size is given as --examples"
                raise BadCase("sampler", self.sampler, right)
            if self.drop_last:
                right = "left out, unless the dataset's size is given as --examples"
                raise BadCase("drop_last", self.drop_last, right)
            return
        check_count("examples", self.examples)
        each = self.examples_per_process
        if self.drop_last and self.deals_full_batches:
            each = self.examples // self.processes
        if self.drop_last and each is not None and each < self.batch:
            whose = "there are" if self.processes == 1 else f"each of {self.processes} ranks gets"
            right = (
                f"at most {each}, the examples that {whose}: with a larger batch, drop_last leaves "
                "no step in an epoch"
            )
            raise BadCase("batch", self.batch, right)

    @property
    def is_adam(self) -> bool:
        """True for Adam and AdamW, which both cancel a constant factor of the gradient."""
        return self.optimizer != "sgd"

    @property
    def processes(self) -> int:
        """The processes that train together, each with a batch of its own: the world size."""
        if self.parallelism in ONE_PROCESS:
            return 1
        return self.nodes if self.parallelism == "hybrid" else self.nodes * self.ranks_per_node

    @property
    def replicas(self) -> int:
        """The GPUs that one process drives."""
        return self.ranks_per_node if self.parallelism in WITH_REPLICAS else 1

    @property
    def replica_sizes(self) -> tuple[int, ...]:
        """The examples of each replica that gets any; nn.DataParallel cuts by ``Tensor.chunk``."""
        size = -(-self.batch // self.replicas)
        starts = range(0, self.batch, size)
        return tuple(min(size, self.batch - start) for start in starts)

    @property
    def loss_sizes(self) -> tuple[int, ...]:
        """The examples that each loss of one micro-batch sees in one process."""
        inside = self.parallelism == "data-parallel-loss-inside"
        return self.replica_sizes if inside else (self.batch,)

    @property
    def effective_batch(self) -> int:
        """The examples of one optimizer step, over all ranks and micro-batches."""
        return self.batch * self.processes * self.accumulation

    @property
    def examples_per_process(self) -> int | None:
        """The examples that the sampler gives each rank in an epoch."""
        if self.examples is None:
            return None
        if self.deals_full_batches:
            batches = (
                self.examples // self.batch if self.drop_last else -(-self.examples // self.batch)
            )
            each = batches // self.processes if self.drop_last else -(-batches // self.processes)
            return each * self.batch
        return -(-self.examples // self.processes)

    @property
    def deals_full_batches(self) -> bool:
        """True if every rank gets full batches only. Accelerate leaves one process its loader."""
        return self.sampler == "even-batches" and self.processes > 1


def token_counts(setup: Setup) -> int:
    """By how many counts of tokens the losses of one step are divided."""
    of_each_process = len(setup.loss_sizes) * setup.accumulation
    counts = {
        "micro-batch": of_each_process * setup.processes,
        "step": setup.processes,
        "all-ranks": 1,
    }
    return counts[setup.tokens_over]


def framework_divisor(setup: Setup) -> int:
    """The number by which the sum of all processes' gradients is divided."""
    return setup.processes if setup.parallelism in ("ddp", "hybrid") else 1
