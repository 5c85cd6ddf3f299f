"""Runs an explained setup on ranks, and compares what they find with what was worked out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import isclose
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case import settings
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.models.model import (
    OUTPUT_SIZE,
    ROW_SIZE,
    SEQUENCE_LENGTH,
    VOCABULARY_SIZE,
)
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.explain.arithmetic import explain
from ddp_equivalence.commands.explain.explanation import (
    Explanation,
    KnownGood,
    Setup,
    framework_divisor,
    number,
    times,
)
from ddp_equivalence.commands.explain.verified import (
    LARGEST_RATIO,
    ComparedPrediction,
    Verification,
    VerificationOutcome,
    can_train,
    trained_stand_ins,
)
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.ranks import Rank
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies.emulated_data_parallel import Replicas

# Run an explained setup on ranks, and compare what they find with what was worked out.

STEPS = 3
LEARNING_RATE = Fraction(1, 10)
EPS = 1e-3
"""Adam's eps in the training: with torch's default of 1e-8 a wrong factor of it would not show."""
SLOWEST, FASTEST = 1e-4, 0.5
"""The learning rates with which the small model trains; a known one outside them is replaced."""

MakeOptimizerOfStep = Callable[[Any], torch.optim.Optimizer]


def verify(explanation: Explanation) -> Verification:
    """Run the setup on ranks, scaled down if it is large.

    If the ranks find something else than the explanation says, the Verification says so; nothing is
    raised.
    """
    setup, scaled = scaled_down(explanation.setup)
    # A smaller setup needs its own prediction. Otherwise the given explanation is verified.
    predicted = explain(setup) if scaled else explanation
    mended = not predicted.is_multiple
    with settings.using(settings.replaced(second_look=False)):
        verdict, gradient = _gradient(setup, predicted)
        if predicted.is_multiple != explanation.is_multiple:
            why = (
                "Scaled down, it is not the same question: of the two setups, only one has a "
                "gradient that is a multiple of g."
            )
            gradient = replace(gradient, outcome="unknown", why=why)
        comparisons = [gradient]
        if mended:
            comparisons.append(_mended(setup, predicted))
        comparisons.append(_training(setup, predicted, mended))
        rates = explanation.learning_rates
        if rates is not None and can_train(rates.scaling):
            comparisons += trained_stand_ins(setup, rates)
    left_out = not_run(explanation)
    return Verification(setup, verdict.lane.name, scaled, tuple(comparisons), left_out)


def _gradient(setup: Setup, predicted: Explanation) -> tuple[Verdict, ComparedPrediction]:
    """The gradient of the setup as it was given."""
    verdict = check(case_of(setup, 1), partial(gradient_step, setup))
    counts = counts_of(setup)
    return verdict, _compared("gradient", expected(predicted, counts), verdict, counts)


def _mended(setup: Setup, predicted: Explanation) -> ComparedPrediction:
    """The gradient of the setup after the change that the explanation advises."""
    what = "gradient with one loss over the gathered outputs"
    if setup.loss == "token-mean":
        what = "gradient with one count of all tokens"
    verdict = check(case_of(setup, 1), partial(mended_step, setup))
    return _compared(what, ExpectedResult(predicted.mended_factor, None, predicted.unit), verdict)


def _compared(
    what: str, predicted: ExpectedResult, verdict: Verdict, counts: Sequence[int] | None = None
) -> ComparedPrediction:
    gradients = measured(verdict)
    if gradients is None or (verdict.outcome == "unknown" and verdict.reason):
        wanted = expected_text(predicted)
        return ComparedPrediction(what, wanted, "nothing", "unknown", _why_unknown(verdict))
    return judged(what, predicted, gradients, counts)


def _training(setup: Setup, predicted: Explanation, mended: bool) -> ComparedPrediction:
    """Training with the learning rate that was worked out, and one big batch with the known one."""
    known, given = _trainable(setup), setup.known_good
    if predicted.learning_rates is None or known != given:
        setup = replace(setup, known_good=known)
        predicted = explain(setup)
    assert predicted.learning_rates is not None
    rate, wanted = float(predicted.learning_rates.same_step), float(_rate_for_mean(known))
    of_ranks: MakeOptimizerOfStep = partial(torch.optim.SGD, lr=rate)
    of_one: MakeOptimizerOfStep = partial(torch.optim.SGD, lr=wanted)
    eps = ""
    if setup.is_adam:
        # The known loss has the same steps with its own eps, so one big batch takes its mean.
        wanted, factor = rate, predicted.mended_factor
        of_ranks = partial(torch.optim.Adam, lr=rate, eps=EPS * float(factor))
        of_one = partial(torch.optim.Adam, lr=wanted, eps=EPS)
        eps = f" and eps {number(EPS)}" + (f" x {times(factor)}" if factor != 1 else "")
    what = (
        f"{STEPS} {'Adam' if eps else 'SGD'} steps with "
        f"{'that change and ' if mended else ''}learning rate {number(rate)}{eps}, one big batch "
        f"with {number(wanted)}{f' and {number(EPS)}' if eps else ''}"
    )
    if given is not None and known != given:
        what += f" in place of your {number(given.learning_rate)}"
    step = partial(training, setup, mended, of_ranks)
    verdict = check(case_of(setup, STEPS), step, compare="update", optimizer=of_one, steps=STEPS)
    same = "the same weights"
    if verdict.outcome == "unknown":
        return ComparedPrediction(what, same, "nothing", "unknown", _why_unknown(verdict))
    if verdict.outcome == "same":
        return ComparedPrediction(what, same, same, "agrees")
    return ComparedPrediction(what, same, f"something else (error {verdict.error:.2g})", "differs")


def _why_unknown(verdict: Verdict) -> str:
    failure = f" {verdict.failure}" if verdict.failure else ""
    return f"{verdict.reason}.{failure}".strip()


def _trainable(setup: Setup) -> KnownGood:
    """The known good learning rate, or 0.1 if the small model cannot train with it."""
    known = setup.known_good
    if known is not None:
        rate = known.learning_rate if setup.is_adam else _rate_for_mean(known)
        if SLOWEST <= rate <= FASTEST:
            return known
    return KnownGood(setup.effective_batch, LEARNING_RATE)


def _rate_for_mean(known: KnownGood) -> Fraction:
    """The learning rate of SGD that trains the same if the known loss is taken as a mean."""
    return known.learning_rate * known.factor


# Compare what was worked out with the gradients that ranks hold.

EXACT = 1e-9
"""The relative difference up to which two factors are the same. Rounding in float64 stays below
1e-12.
"""
LITTLE = 1e-6
"""The remainder up to which a gradient is a multiple of g. A remainder is the root of a difference
of squares, so rounding makes it up to 1e-8. Unequal counts leave more than 1e-2.
"""


@dataclass(frozen=True)
class ExpectedResult:
    """The gradient that every rank should hold.

    It is ``factor`` x g if ``shares`` is None. Otherwise it is no multiple of g: ``shares`` says
    how often each example (or token) counts, and ``factor`` is the average. ``unit``: the text
    calls the gradient of the mean loss times this number g.
    """

    factor: Fraction
    shares: tuple[Fraction, ...] | None
    unit: int = 1


def expected(explanation: Explanation, counts: Sequence[int]) -> ExpectedResult:
    """The gradient that every rank should hold.

    ``counts``: how much each example of a step weighs in the big batch's mean: 1, or its tokens.
    """
    if explanation.is_multiple:
        return ExpectedResult(explanation.factor, None, explanation.unit)
    if explanation.setup.loss == "token-mean":
        shares = _shares_of_tokens(explanation, counts)
        return ExpectedResult(explanation.factor, shares, explanation.unit)
    setup = explanation.setup
    of_micro_batch = tuple(share for size, share in explanation.shares for _ in range(size))
    shares = of_micro_batch * setup.accumulation * setup.processes
    return ExpectedResult(explanation.factor, shares, explanation.unit)


def expected_text(prediction: ExpectedResult) -> str:
    """The expected gradient in words."""
    factor = f"{number(prediction.factor / prediction.unit)} g"
    return factor if prediction.shares is None else f"no multiple of g, {factor} on average"


def judged(
    what: str, prediction: ExpectedResult, measured: Measured, counts: Sequence[int] | None = None
) -> ComparedPrediction:
    """Compare the gradient of every rank with the expected one.

    ``what``: the name of what is compared. ``counts``: as in ``expected``; needed if the expected
    gradient is no multiple of g.
    """
    wanted = expected_text(prediction)
    if measured.unexplained < LITTLE:
        holds = f"{_by_rank(measured.factors, prediction.unit)} g"
        right = prediction.shares is None and _alike(measured.factors, prediction.factor, EXACT)
        return ComparedPrediction(what, wanted, holds, _outcome(right))
    holds = f"no multiple of g ({measured.unexplained:.2g} of it unexplained)"
    if prediction.shares is None:
        return ComparedPrediction(what, wanted, holds, "differs")
    if measured.shares is None and measured.unmixed >= LITTLE:
        holds += f"; {measured.unmixed:.2g} of it comes from no example"
        return ComparedPrediction(what, wanted, holds, "differs")
    if measured.shares is None:
        why = f"It is unknown how often each example counts: {measured.why}."
        return ComparedPrediction(what, wanted, holds, "unknown", why)
    weights = counts or [1] * len(prediction.shares)
    averages = tuple(
        sum(share * count for share, count in zip(row, weights, strict=True)) / sum(weights)
        for row in measured.shares
    )
    right = _alike(averages, prediction.factor, LITTLE) and all(
        _alike((share,), exact, LITTLE)
        for row in measured.shares
        for share, exact in zip(row, prediction.shares, strict=True)
    )
    holds += f", {_by_rank(averages, prediction.unit)} g on average"
    holds += f"; examples count {_range(measured.shares)} times"
    holds += ", each as predicted" if right else f", predicted {_range([prediction.shares])}"
    if measured.unmixed >= LITTLE:
        holds += f"; {measured.unmixed:.2g} of it comes from no example"
        right = False
    return ComparedPrediction(what, wanted, holds, _outcome(right))


def _outcome(right: bool) -> VerificationOutcome:
    return "agrees" if right else "differs"


def _shares_of_tokens(explanation: Explanation, counts: Sequence[int]) -> tuple[Fraction, ...]:
    """How often the tokens of each example count.

    On a rank a token is divided by the tokens that are counted with it and by all later divisors;
    in the big batch it is divided by all tokens.
    """
    setup, total = explanation.setup, sum(counts)
    accumulated = setup.accumulation if setup.accumulation_divided else 1
    after = Fraction(len(setup.loss_sizes) * accumulated * framework_divisor(setup))
    after /= setup.loss_times.value(setup.processes)
    sizes = setup.loss_sizes * setup.accumulation * setup.processes
    if setup.tokens_over == "step":
        sizes = (setup.batch * setup.accumulation,) * setup.processes
    shares: list[Fraction] = []
    for size in sizes:
        tokens = sum(counts[len(shares) : len(shares) + size])
        shares += [total / (tokens * after)] * size
    return tuple(shares)


def _alike(values: Sequence[float], wanted: Fraction, limit: float) -> bool:
    return all(isclose(value, wanted, rel_tol=limit) for value in values)


def _by_rank(values: Sequence[float], unit: int) -> str:
    texts = [number(value / unit) for value in values]
    return texts[0] if len(set(texts)) == 1 else f"{', '.join(texts)} (by rank)"


def _range(rows: Sequence[Sequence[float | Fraction]]) -> str:
    values = [value for row in rows for value in row]
    return f"{number(float(min(values)))} to {number(float(max(values)))}"


# The gradients that ranks hold, as multiples of the big batch's: read from a verdict.


@dataclass(frozen=True)
class Measured:
    """The gradients that the ranks hold; g is the gradient of the big batch.

    ``factors``: for each rank the k for which k g is nearest to its gradient. ``unexplained``: the
    largest remainder of any rank, relative to the rank's gradient. ``shares``: for each rank how
    often each example (or token) counts; None if this is unknown for some, and ``why`` gives the
    reason. ``unmixed``: the largest part of any rank's gradient that the shares do not explain,
    relative to the gradient.
    """

    factors: tuple[float, ...]
    unexplained: float
    shares: tuple[tuple[float, ...], ...] | None
    why: str = ""
    unmixed: float = 0.0


def measured(verdict: Verdict) -> Measured | None:
    """The gradients that a verdict is about; None if nothing was compared."""
    comparison = verdict.comparison
    if comparison is None or comparison.structure or not comparison.parameters:
        return None
    fits = [_nearest(comparison, rank) for rank in comparison.ranks]
    shares, why = _shares(verdict)
    unmixed = verdict.why_no_shares.left_over if verdict.why_no_shares is not None else 0.0
    if verdict.shares is not None:
        unmixed = max(verdict.shares.unexplained.values())
    factors = tuple(factor for factor, _ in fits)
    return Measured(factors, max(rest for _, rest in fits), shares, why, unmixed)


def _nearest(comparison: Comparison, rank: int) -> tuple[float, float]:
    """The factor that fits all parameters of a rank best (least squares), and its remainder."""
    found = [
        (parameter.norm, one)
        for parameter in comparison.parameters
        for one in parameter.by_rank
        if one.rank == rank
    ]
    if any(not norm and one.error for norm, one in found):
        return math.nan, math.inf  # a gradient where the big batch has none
    found = [(norm, one) for norm, one in found if norm]
    factor = sum(one.factor * norm**2 for norm, one in found) / sum(norm**2 for norm, _ in found)
    squares = sum((one.ratio * norm) ** 2 for norm, one in found)
    # The remainder of each parameter, plus what one factor for all parameters adds to it.
    rest = sum(
        (one.unexplained * one.ratio * norm) ** 2 + ((one.factor - factor) * norm) ** 2
        for norm, one in found
    )
    return factor, math.sqrt(rest / squares) if squares else 0.0


def _shares(verdict: Verdict) -> tuple[tuple[tuple[float, ...], ...] | None, str]:
    """How often every example counts on every rank; or None and the reason."""
    shares = verdict.shares
    if shares is None:
        return None, verdict.why_no_shares.reason if verdict.why_no_shares else ""
    if shares.by_example is None:
        return None, shares.why_not_examples
    rows = [shares.by_example[rank] for rank in sorted(shares.by_example)]
    known = tuple(tuple(one for one in row if one is not None) for row in rows)
    if any(len(found) < len(row) for found, row in zip(known, rows, strict=True)):
        return None, "some examples have no gradient of their own"
    return known, ""


# A smaller setup that can run here, with as many ranks and micro-batches as possible.

MOST_RANKS = 8
MOST_RANKS_A_NODE = 4
"""The most ranks on each node if there are several nodes, so that there still are several."""
MOST_MICRO_BATCHES = 32
SMALL_BATCH = 6
MOST_TOLD_APART = 96
"""The most examples whose shares the gradients of the small models can tell apart."""


def scaled_down(setup: Setup) -> tuple[Setup, tuple[str, ...]]:
    """The smaller setup, and phrases that say how it differs from ``setup``."""
    ranks, nodes = setup.ranks_per_node, setup.nodes
    if setup.parallelism == "hybrid" or setup.processes > 1 or setup.replicas > 1:
        ranks = min(ranks, MOST_RANKS if nodes == 1 else MOST_RANKS_A_NODE)
        together = 1 if setup.parallelism == "hybrid" else ranks
        nodes = min(nodes, MOST_RANKS // together)
    small = replace(
        setup,
        nodes=nodes,
        ranks_per_node=ranks,
        examples=None,
        drop_last=False,
    )
    small = replace(small, batch=_small_batch(setup, small))
    micro_batches = min(setup.accumulation, _most_micro_batches(small))
    small = replace(small, accumulation=micro_batches)
    differences = []
    if (nodes, ranks) != (setup.nodes, setup.ranks_per_node):
        now, was = f"{nodes} x {ranks}", f"{setup.nodes} x {setup.ranks_per_node}"
        differences.append(f"nodes x ranks per node {now} instead of {was}")
    if micro_batches != setup.accumulation:
        differences.append(f"{micro_batches} micro-batches instead of {setup.accumulation}")
    if small.batch != setup.batch:
        differences.append(f"batch {small.batch} instead of {setup.batch}")
    return small, tuple(differences)


def _small_batch(setup: Setup, small: Setup) -> int:
    """The largest small batch that is dealt to the replicas as evenly as the real one."""
    limit = max(SMALL_BATCH, 3 * small.replicas)

    def shape(dealt: Setup) -> tuple[bool, bool]:
        return len(dealt.replica_sizes) == dealt.replicas, len(set(dealt.replica_sizes)) == 1

    wanted = shape(setup)
    sizes = range(min(setup.batch, limit), 0, -1)
    return next((n for n in sizes if shape(replace(small, batch=n)) == wanted), sizes[0])


def _most_micro_batches(small: Setup) -> int:
    if explain(small).is_multiple:
        return MOST_MICRO_BATCHES
    return max(2, MOST_TOLD_APART // (small.batch * small.processes))


# The big batches that a verification compares with. They have a small model and a mean loss.

FEWEST_TOKENS = 3
"""The fewest tokens of an example. Two examples with one token each may well be the same, and then
nothing shows how often each of them counts.
"""


def case_of(setup: Setup, steps: int) -> Case:
    """The big batch: a mean loss over the effective batch, even if the ranks take another loss."""
    ranks = setup.processes // setup.nodes
    layout, total = f"{setup.nodes}x{ranks}", setup.effective_batch * steps
    if setup.loss == "token-mean":
        batch = partial(token_batch, setup.effective_batch, steps)
        return Case(model="gru_tied", loss="token_mean", batch=batch, layout=layout)
    batch = partial(labelled_batch, total)
    return Case(model="mlp", loss="cross_entropy_mean", batch=batch, layout=layout)


def counts_of(setup: Setup) -> Sequence[int]:
    """How much each example of a step weighs in the big batch's mean: 1, or its tokens."""
    if setup.loss == "token-mean":
        return _token_counts(setup.effective_batch)
    return [1] * setup.effective_batch


def labelled_batch(examples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of the small model, shape (examples, 7), and labels, shape (examples,)."""
    rows = torch.randn(examples, ROW_SIZE, generator=generator)
    return {
        "inputs": rows,
        "targets": torch.randint(OUTPUT_SIZE, (examples,), generator=generator),
    }


def token_batch(examples: int, steps: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Token ids and targets, shape (examples x steps, 9).

    Later examples of a step have more tokens that count, so that the first and the last part of a
    step never have equally many. A single example has one token; otherwise each example has at
    least FEWEST_TOKENS.
    """
    shape = (examples * steps, SEQUENCE_LENGTH)
    inputs = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
    targets = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
    counts = torch.tensor(_token_counts(examples) * steps)
    padded = torch.arange(SEQUENCE_LENGTH) >= counts[:, None]
    return {"inputs": inputs, "targets": targets.masked_fill(padded, PADDING)}


def _token_counts(examples: int) -> list[int]:
    if examples == 1:
        return [1]
    more = SEQUENCE_LENGTH - FEWEST_TOKENS + 1
    return [FEWEST_TOKENS + index * more // examples for index in range(examples)]


# The steps that ``--verify`` runs on a rank, written as a user writes them.

PADDING = -100
"""torch's own default for ``ignore_index``."""


def gradient_step(setup: Setup, model: nn.Module, shard: Any, rank: Rank) -> None:
    """Leave the setup's gradient of one optimizer step on the model's parameters."""
    counted = setup.tokens_over != "micro-batch"
    loss = partial(loss_of, reduction="sum" if counted or setup.loss == "sum" else "mean")
    factor = float(setup.loss_times.value(setup.processes))
    divisor = setup.accumulation if setup.accumulation_divided else 1
    tokens = _tokens(setup, shard, setup.tokens_over == "all-ranks") if counted else 1

    def scaled(value: Tensor) -> Tensor:
        return value * factor / divisor / tokens

    _backward_all(setup, model, shard, scaled, loss, inside="mean")


def mended_step(setup: Setup, model: nn.Module, shard: Any, rank: Rank) -> None:
    """Leave the gradient of one optimizer step of a setup that follows the advice.

    A mean over tokens divides by one count of all tokens, and by nothing else. Replicas with uneven
    parts of the batch have one loss over their gathered outputs.
    """
    if setup.loss != "token-mean":
        gradient_step(replace(setup, parallelism="data-parallel"), model, shard, rank)
        return
    tokens = _tokens(setup, shard, True)
    averaged = setup.processes if setup.parallelism in ("ddp", "hybrid") else 1
    loss = partial(loss_of, reduction="sum")
    _backward_all(setup, model, shard, lambda value: value * averaged / tokens, loss, inside="sum")


def _tokens(setup: Setup, shard: Any, of_all_ranks: bool) -> Tensor:
    """The number of tokens in this shard, or in those of all ranks."""
    tokens: Tensor = (shard["targets"] != PADDING).sum()
    if of_all_ranks and setup.processes > 1:
        dist.all_reduce(tokens)
    return tokens


def training(
    setup: Setup,
    mended: bool,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    model: nn.Module,
    shard: Any,
    rank: Rank,
) -> None:
    """Train consecutive steps. The shard holds the examples of all of them.

    ``mended``: whether the setup follows the advice. ``make_optimizer``: takes the parameters.
    """
    one_step = mended_step if mended else gradient_step
    optimizer = make_optimizer(model.parameters())
    for part in _cut(shard, setup.batch * setup.accumulation):
        optimizer.zero_grad()
        one_step(setup, model, part, rank)
        optimizer.step()


def loss_of(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Cross entropy of examples (examples, classes), or of tokens (examples, time, classes)."""
    if outputs.ndim == 3:
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
    return F.cross_entropy(outputs, targets, reduction=reduction, ignore_index=PADDING)


def _backward_all(
    setup: Setup,
    model: nn.Module,
    shard: Any,
    scaled: Callable[[Tensor], Tensor],
    loss: LossOf,
    inside: Literal["mean", "sum"],
) -> None:
    """Run backward for every micro-batch, and reduce the gradients over the ranks.

    ``scaled``: maps the loss of a micro-batch to the value that backward starts from. ``inside``:
    the reduction of the replicas' losses, if each replica has its own.
    """
    wrapped = _wrapped(setup, model, loss)
    window = _cut(shard, setup.batch)
    for count, batch in enumerate(window, start=1):
        with nullcontext() if count == len(window) else _not_reducing(wrapped):
            if setup.parallelism == "data-parallel-loss-inside":
                losses = wrapped(batch["inputs"], batch["targets"])
                value = losses.mean() if inside == "mean" else losses.sum()
            else:
                value = loss(wrapped(batch["inputs"]), batch["targets"])
            scaled(value).backward()
    if setup.parallelism == "all-reduce-sum" and setup.processes > 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


def _wrapped(setup: Setup, model: nn.Module, loss: LossOf) -> nn.Module:
    match setup.parallelism:
        case "ddp":
            return DistributedDataParallel(model)
        case "hybrid":
            return DistributedDataParallel(EmulatedDataParallel(model, setup.replicas))
        case "data-parallel":
            return EmulatedDataParallel(model, setup.replicas)
        case "data-parallel-loss-inside":
            return EmulatedDataParallel(LossInside(model, loss), setup.replicas)
        case _:
            return model


def _not_reducing(wrapped: nn.Module) -> AbstractContextManager[Any]:
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def _cut(shard: Any, size: int) -> list[dict[str, Tensor]]:
    pieces = {name: leaf.split(size) for name, leaf in shard.items()}
    return [
        {"inputs": inputs, "targets": targets}
        for inputs, targets in zip(pieces["inputs"], pieces["targets"], strict=True)
    ]


# nn.DataParallel emulated in one process, as a module that DistributedDataParallel can wrap.

LossOf = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> scalar."""


class EmulatedDataParallel(nn.Module):
    """Takes the place of ``nn.DataParallel(module)`` on ``gpus`` GPUs.

    ``Replicas`` runs a replica of the module on each part of the batch and gathers the outputs,
    which must be one tensor. The batch is cut by ``Tensor.chunk``, as nn.DataParallel cuts it.
    Backward leaves the sum of the replicas' gradients on the module's own parameters.
    """

    def __init__(self, module: nn.Module, gpus: int) -> None:
        super().__init__()
        self.replicas, self.gpus = Replicas(module), gpus

    def forward(self, *inputs: Tensor) -> Tensor:
        """The gathered outputs for inputs of shape (examples, ...)."""
        self.replicas.sizes = [len(part) for part in inputs[0].chunk(self.gpus)]
        trained = {
            name: parameter
            for name, parameter in self.replicas.model.named_parameters()
            if parameter.requires_grad
        }
        names, parameters = tuple(trained), tuple(trained.values())
        gathered: Tensor = _SumOverReplicas.apply(  # type: ignore[no-untyped-call]  # torch's own
            self.replicas, inputs, names, *parameters
        )
        return gathered


class LossInside(nn.Module):
    """A module that returns its own loss, shape (1,), so that the losses can be gathered."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model(inputs), targets).reshape(1)


class _SumOverReplicas(torch.autograd.Function):
    """Connects the gathered outputs with the module's own parameters.

    ``Replicas`` gives every replica weights that are leaves of the autograd graph. The hooks of
    DistributedDataParallel fire only if autograd brings a gradient to the module's parameters.
    Backward therefore runs through the replicas and hands the sum of their gradients on, as the
    backward of nn.DataParallel's broadcast does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replicas: Replicas,
        inputs: tuple[Tensor, ...],
        names: tuple[str, ...],
        *parameters: nn.Parameter,
    ) -> Tensor:
        with torch.enable_grad():
            outputs: Tensor = replicas(*inputs)
        ctx.outputs, ctx.names, ctx.weights = outputs, names, replicas.weights_by_replica
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        torch.autograd.backward(ctx.outputs, gradients)
        return (None, None, None, *(_sum_of_gradients(ctx.weights, name) for name in ctx.names))


def _sum_of_gradients(replicas: list[dict[str, Tensor]], name: str) -> Tensor | None:
    """The sum over the replicas; None if no replica has a gradient for this parameter."""
    gradients = [weights[name].grad for weights in replicas]
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) if present else None


# The parts of an explanation that a verification does not run, as phrases.


def not_run(explanation: Explanation) -> tuple[str, ...]:
    """One phrase for each part that is not run, in the order of the text."""
    setup, rates = explanation.setup, explanation.learning_rates
    phrases = []
    if rates is not None and rates.scaling != 1 and not can_train(rates.scaling):
        phrases.append(
            "the square-root and the linear learning rate (the stand-in trains with batches that "
            f"differ up to {LARGEST_RATIO} times)"
        )
    elif rates is not None and rates.adam is not None and rates.names_eps:
        betas = "betas and eps are" if rates.adam.in_reach else "eps is"
        phrases.append(f"what Adam's other {betas} good for")  # the stand-in hardly shows it
    factor = rates.relative if rates else explanation.mended_factor / explanation.unit
    if factor != 1 and not setup.is_adam:
        phrases.append("weight decay, clipping and momentum")
    elif factor != 1:
        phrases.append("weight decay and clipping")
    if setup.examples is not None:
        phrases.append("the epoch")
    return tuple(phrases)
