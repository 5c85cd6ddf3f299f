"""Runs an explained setup on ranks, and compares what they hold with what was worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

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
from ddp_equivalence.commands.explain.explanation import (
    Explanation,
    LocalLoss,
    counts_of,
    explain,
    learning_rates_of,
    number,
    times,
)
from ddp_equivalence.commands.explain.setup import KnownGood, Setup
from ddp_equivalence.ranks import Rank
from ddp_equivalence.report.text import plural, wrapped
from ddp_equivalence.report.verdict import Outcome, Verdict
from ddp_equivalence.strategies.emulated_data_parallel import EmulatedDataParallel

STEPS = 3
LEARNING_RATE = Fraction(1, 10)
EPS = 1e-3
"""Adam's eps in the training: with torch's default of 1e-8 a wrong factor of it would not show."""
SLOWEST, FASTEST = 1e-4, 0.5
"""The learning rates with which the small model trains."""


@dataclass(frozen=True)
class Verification:
    """The results of ranks.

    ``setup``: the setup that they ran. ``scaled``: how it differs from the explained one.
    ``checks``: the verdict on each prediction. ``not_run``: the parts of the explanation that were
    not verified.
    """

    setup: Setup
    scaled: tuple[str, ...]
    checks: Mapping[str, Verdict]
    not_run: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of any prediction."""
        outcomes = {verdict.outcome for verdict in self.checks.values()}
        return next(one for one in ("different", "unknown", "same") if one in outcomes)

    def __str__(self) -> str:
        verb = {"same": "it agrees", "different": "IT DIFFERS", "unknown": "not judged"}
        ranks = self.setup.processes
        lane = next(iter(self.checks.values())).lane.name
        where = f"{ranks} {plural(ranks, 'process', 'processes')} ({lane})"
        text = f"Verified on {where}: {verb[self.outcome]}."
        if self.scaled:
            text += f" Scaled down: {'; '.join(self.scaled)}."
        if self.setup.replicas > 1:
            text += " DataParallel's replicas are emulated in their process."
        sentences = [f"{what}: {_found(verdict)}." for what, verdict in self.checks.items()]
        if self.not_run:
            sentences.append(f"Not run: {'; '.join(self.not_run)}.")
        lines = wrapped(text, "  ", "  ")
        for sentence in sentences:
            lines += wrapped(sentence, "    ", "    ")
        return "\n".join(lines) + "\n"


def verify(explanation: Explanation) -> Verification:
    """Run the setup on ranks, scaled down if it is large.

    If the ranks find something else than the explanation says, the Verification says so; nothing is
    raised.
    """
    setup, scaled = scaled_down(explanation.setup)
    # A smaller setup needs its own prediction. Otherwise the given explanation is verified.
    predicted = explain(setup) if scaled else explanation
    with settings.using(settings.replaced(second_look=False)):
        checks = dict((*_gradients(predicted), _training(predicted)))
    return Verification(setup, scaled, checks, tuple(_not_run(explanation)))


def _found(verdict: Verdict) -> str:
    error = verdict.error or 0.0
    return {
        "same": f"the same on every rank (error {error:.1g})",
        "different": f"something else (error {error:.2g})",
        "unknown": f"not judged, because {verdict.reason} {verdict.failure or ''}".strip(),
    }[verdict.outcome]


def _gradients(predicted: Explanation) -> Iterator[tuple[str, Verdict]]:
    """Check the gradient, and that of the setup with the advised change."""
    mended = predicted.mended
    what = f"gradient, {'no multiple of g, ' if mended else ''}{times(predicted.factor)} g"
    counts = [predicted.factor] * predicted.setup.effective_batch
    if mended is not None:
        what, counts = f"{what} on average", shares_by_example(predicted)
    yield what, check(case_of(predicted.setup, counts), partial(gradient_step, predicted.setup))
    if mended is not None:
        case = case_of(predicted.setup, [mended.factor] * predicted.setup.effective_batch)
        what = f"gradient with that change, {times(mended.factor)} g"
        yield what, check(case, partial(gradient_step, mended.setup))


def _training(predicted: Explanation) -> tuple[str, Verdict]:
    """Train with the learning rate for a step of the same length, and one big batch with the known
    one. Both are scaled if the small model does not train with them.
    """
    setup, final = predicted.setup, (predicted.mended or predicted).setup
    known = setup.known_good or KnownGood(setup.effective_batch, LEARNING_RATE)
    factor = (predicted.mended or predicted).factor
    rates = predicted.learning_rates or learning_rates_of(replace(setup, known_good=known), factor)
    assert rates is not None
    of_mean = known.learning_rate * (1 if setup.is_adam else known.factor)
    scale = 1 if SLOWEST <= of_mean <= FASTEST else LEARNING_RATE / of_mean
    rate, wanted, name = float(rates.same_step * scale), float(of_mean * scale), "SGD"
    of_ranks: Callable[..., Any] = partial(torch.optim.SGD, lr=rate)
    of_one: Callable[..., Any] = partial(torch.optim.SGD, lr=wanted)
    eps = ""
    if setup.is_adam:
        # One big batch takes the mean of the known loss, which has the same steps with its own eps.
        by = EPS * float(rates.relative * known.factor)
        of_ranks = partial(torch.optim.Adam, lr=rate, eps=by)
        of_one = partial(torch.optim.Adam, lr=wanted, eps=EPS)
        name, eps = "Adam", f" and eps {number(by)}"
    what = (
        f"weights after {STEPS} {name} steps with {'that change and ' if predicted.mended else ''}"
        f"learning rate {number(rate)}{eps}, one big batch with {number(wanted)}"
    )
    what += f" (yours x {number(scale)})" if scale != 1 else ""
    case = case_of(setup, [Fraction(1)] * setup.effective_batch, STEPS)
    step = partial(training, final, of_ranks)
    return what, check(case, step, compare="update", optimizer=of_one, steps=STEPS)


def shares_by_example(predicted: Explanation) -> list[Fraction]:
    """How often each example of a step (or each of its tokens) counts on the ranks."""
    setup = predicted.setup
    if setup.loss != "token-mean":
        one = [share for size, share in predicted.shares for _ in range(size)]
        return one * setup.accumulation * setup.processes
    tokens = _token_counts(setup.effective_batch)
    each, found = setup.batch * setup.accumulation, list[Fraction]()
    sizes = setup.loss_sizes(setup.batch)
    for size in sizes * setup.accumulation * setup.processes:
        at, first = len(found), len(found) // each * each
        of_loss, of_process = tokens[at : at + size], tokens[first : first + each]
        counted = sum(of_loss), sum(of_process), sum(tokens)
        loss = LocalLoss(*counted, len(sizes), setup.accumulation)
        found += [counts_of(setup, loss)] * size
    return found


def _not_run(explanation: Explanation) -> Iterator[str]:
    """The parts of an explanation that are not run."""
    setup, rates = explanation.setup, explanation.learning_rates
    if rates is not None and rates.scaling != 1:
        yield "the square-root and the linear learning rate"
    if explanation.relative != 1:
        yield "weight decay and clipping"
    if setup.examples is not None:
        yield "the epoch"


# A smaller setup that can run here, with as many ranks and micro-batches as possible.

MOST_RANKS = 8
MOST_RANKS_A_NODE = 4
"""The most ranks on each node if there are several nodes, so that there still are several."""
MOST_MICRO_BATCHES = 8
SMALL_BATCH = 6
SCALED = ("nodes", "ranks_per_node", "accumulation", "batch")


def scaled_down(setup: Setup) -> tuple[Setup, tuple[str, ...]]:
    """The smaller setup, and phrases that say how it differs from ``setup``."""
    ranks = min(setup.ranks_per_node, MOST_RANKS if setup.nodes == 1 else MOST_RANKS_A_NODE)
    together = 1 if setup.parallelism == "hybrid" else ranks
    small = replace(
        setup,
        nodes=min(setup.nodes, MOST_RANKS // together),
        ranks_per_node=ranks,
        accumulation=min(setup.accumulation, MOST_MICRO_BATCHES),
        examples=None,
    )

    def dealt(one: Setup, batch: int) -> tuple[bool, bool]:
        """Whether all replicas get examples, and whether they get equally many."""
        sizes = one.replica_sizes(batch)
        return len(sizes) == one.replicas, len(set(sizes)) == 1

    sizes = range(min(setup.batch, max(SMALL_BATCH, 3 * small.replicas)), 0, -1)
    alike = (size for size in sizes if dealt(small, size) == dealt(setup, setup.batch))
    small = replace(small, batch=next(alike, sizes[0]))
    return small, tuple(
        f"{field} {getattr(small, field)} instead of {getattr(setup, field)}"
        for field in SCALED
        if getattr(small, field) != getattr(setup, field)
    )


# The big batch that a verification compares with: a small model, and a loss that counts each
# example as often as the explanation says.

PADDING = -100
"""torch's own default for ``ignore_index``."""
FEWEST_TOKENS = 3


def case_of(setup: Setup, counts: Sequence[Fraction], steps: int = 1) -> Case:
    """The big batch in which example i counts ``counts[i]`` times in a mean, for some steps."""
    examples, tokens = len(counts), setup.loss == "token-mean"
    each = _token_counts(examples) if tokens else [1] * examples
    weights = [float(count / sum(each)) for count in counts] * steps

    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        shape = (examples * steps, SEQUENCE_LENGTH) if tokens else (examples * steps,)
        targets = torch.randint(
            VOCABULARY_SIZE if tokens else OUTPUT_SIZE, shape, generator=generator
        )
        inputs = torch.randn(examples * steps, ROW_SIZE, generator=generator)
        if tokens:
            inputs = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
            padded = torch.arange(SEQUENCE_LENGTH) >= torch.tensor(each * steps)[:, None]
            targets = targets.masked_fill(padded, PADDING)
        weighted = torch.tensor(weights, dtype=torch.double)
        return {"inputs": inputs, "targets": targets, "weights": weighted}

    layout = f"{setup.nodes}x{setup.processes // setup.nodes}"
    model = "gru_tied" if tokens else "mlp"
    return Case(model=model, loss=weighted_loss, batch=batch, layout=layout)


def weighted_loss(model: nn.Module, batch: Any) -> Tensor:
    """The sum over examples of weight times cross entropy, which is summed over its tokens."""
    outputs, targets = model(batch["inputs"]), batch["targets"]
    losses = loss_of(outputs, targets, "none").reshape(len(targets), -1).sum(1)
    total: Tensor = (losses * batch["weights"]).sum()
    return total


def _token_counts(examples: int) -> list[int]:
    """Later examples of a step have more tokens that count, so no two parts have equally many."""
    if examples == 1:
        return [1]
    more = SEQUENCE_LENGTH - FEWEST_TOKENS + 1
    return [FEWEST_TOKENS + index * more // examples for index in range(examples)]


# The steps that run on a rank, written as a user writes them.

LossOf = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> scalar."""


def loss_of(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Cross entropy of examples (examples, classes), or of tokens (examples, time, classes)."""
    if outputs.ndim == 3:
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
    return F.cross_entropy(outputs, targets, reduction=reduction, ignore_index=PADDING)


def gradient_step(setup: Setup, model: nn.Module, shard: Any, rank: Rank) -> None:
    """Leave the setup's gradient of one optimizer step on the model's parameters."""
    counted = setup.tokens_over != "micro-batch"
    loss = partial(loss_of, reduction="sum" if counted or setup.loss == "sum" else "mean")
    divisor: Any = setup.accumulation if setup.accumulation_divided else 1
    if counted:
        tokens = (shard["targets"] != PADDING).sum()
        if setup.tokens_over == "all-ranks" and setup.processes > 1:
            dist.all_reduce(tokens)
        divisor = divisor * tokens
    inside = setup.parallelism == "data-parallel-loss-inside"
    net = LossInside(model, loss) if inside else model
    if setup.replicas > 1 or inside:
        net = EmulatedDataParallel(net, setup.replicas)
    if setup.parallelism in ("ddp", "hybrid"):
        net = DistributedDataParallel(net)
    window = list(
        zip(*(shard[name].split(setup.batch) for name in ("inputs", "targets")), strict=True)
    )
    for count, (inputs, targets) in enumerate(window, start=1):
        reduces = count == len(window) or not isinstance(net, DistributedDataParallel)
        with nullcontext() if reduces else net.no_sync():  # type: ignore[operator]
            value = net(inputs, targets).mean() if inside else loss(net(inputs), targets)
            (value * float(setup.loss_factor) / divisor).backward()
    if setup.parallelism == "all-reduce-sum" and setup.processes > 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


def training(
    setup: Setup, make_optimizer: Callable[..., Any], model: nn.Module, shard: Any, rank: Rank
) -> None:
    """Train consecutive steps, whose examples the shard holds."""
    optimizer = make_optimizer(model.parameters())
    size = setup.batch * setup.accumulation
    for start in range(0, len(shard["inputs"]), size):
        optimizer.zero_grad()
        part = {name: leaf[start : start + size] for name, leaf in shard.items()}
        gradient_step(setup, model, part, rank)
        optimizer.step()


class LossInside(nn.Module):
    """A module that returns its own loss, shape (1,), so that the losses can be gathered."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model(inputs), targets).reshape(1)
