"""What is explained holds in a simulation that shares no code with it.

All ranks are simulated in one process with autograd. Each micro-batch, replica and rank has its own
loss, as in the loop that a user writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from ddp_equivalence.commands.explain import KnownGood, Setup, explain
from ddp_equivalence.commands.explain.explanation import last_step_counts
from ddp_equivalence.commands.explain.setup import ONE_PROCESS, Loss, Optimizer, Parallelism

FEATURES, CLASSES, LENGTH, PADDING = 5, 3, 4, -1
EXAMPLES = 60

FACTORS: dict[str, Callable[[int], float]] = {
    "1": lambda world: 1.0,
    "3": lambda world: 3.0,
    "1/7": lambda world: 1 / 7,
    "world-size": float,
    "world-size/5": lambda world: world / 5,
    "1/world-size": lambda world: 1 / world,
    "2*world-size*world-size": lambda world: 2.0 * world**2,
}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any setup with up to 4 ranks and 4 micro-batches of up to 7 examples."""
    parallelism: Parallelism = draw(st.sampled_from(get_args(Parallelism)))
    alone = parallelism in ONE_PROCESS
    accumulation = draw(st.sampled_from([1, 1, 2, 3, 4]))
    loss: Loss = draw(st.sampled_from(get_args(Loss)))
    counted = ["micro-batch", "step", "all-ranks"] if loss == "token-mean" else ["micro-batch"]
    good = st.builds(
        KnownGood,
        st.integers(1, 40),
        st.sampled_from([Fraction(1, 10), Fraction(3, 1000)]),
        st.sampled_from(["mean"] if loss == "token-mean" else ["mean", "sum"]),
    )
    return Setup(
        batch=draw(st.integers(1, 7)),
        nodes=1 if alone else draw(st.integers(1, 2)),
        ranks_per_node=1 if parallelism == "none" else draw(st.integers(1, 4)),
        accumulation=accumulation,
        accumulation_divided=None if accumulation == 1 else draw(st.booleans()),
        loss=loss,
        loss_times=draw(st.sampled_from(list(FACTORS))),
        tokens_over=draw(st.sampled_from(counted)),
        parallelism=parallelism,
        known_good=draw(st.none() | good),
        examples=draw(st.none() | st.integers(1, 60)),
        optimizer=draw(st.sampled_from(get_args(Optimizer))),
    )


class Data:
    """``examples`` of rows and labels, or of token rows and labels of which some are padding."""

    def __init__(self, examples: int, tokens: bool) -> None:
        generator = torch.Generator().manual_seed(examples)
        shape = (examples, LENGTH) if tokens else (examples,)
        self.rows = torch.randn(*shape, FEATURES, generator=generator, dtype=torch.double)
        self.labels = torch.randint(CLASSES, shape, generator=generator)
        if tokens:
            counts = torch.randint(1, LENGTH + 1, (examples, 1), generator=generator)
            self.labels[torch.arange(LENGTH) >= counts] = PADDING

    def tokens(self, part: slice) -> int:
        return int((self.labels[part] != PADDING).sum())

    def loss(self, model: nn.Module, part: slice, reduction: str) -> Tensor:
        outputs, labels = model(self.rows[part]), self.labels[part]
        return F.cross_entropy(
            outputs.reshape(-1, CLASSES),
            labels.reshape(-1),
            reduction=reduction,
            ignore_index=PADDING,
        )


def new_model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, CLASSES).double()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def big_batch(data: Data, examples: int, reduction: str = "mean") -> Tensor:
    model = new_model()
    data.loss(model, slice(0, examples), reduction).backward()
    return gradient(model)


def simulated(setup: Setup, data: Data) -> Tensor:
    """The gradient that every rank holds after one step."""
    world = 1 if setup.parallelism in ONE_PROCESS else setup.nodes
    if setup.parallelism in ("ddp", "all-reduce-sum"):
        world *= setup.ranks_per_node
    total = torch.zeros(FEATURES * CLASSES + CLASSES, dtype=torch.double)
    everything = slice(0, setup.batch * setup.accumulation * world)
    for rank in range(world):
        model = new_model()
        first = rank * setup.accumulation * setup.batch
        own = slice(first, first + setup.accumulation * setup.batch)
        for begin in range(own.start, own.stop, setup.batch):
            losses = []
            whole = torch.arange(begin, begin + setup.batch)
            inside = setup.parallelism == "data-parallel-loss-inside"
            for piece in whole.chunk(setup.ranks_per_node) if inside else [whole]:
                part = slice(int(piece[0]), int(piece[-1]) + 1)
                if setup.tokens_over == "micro-batch":
                    reduction = "sum" if setup.loss == "sum" else "mean"
                    losses.append(data.loss(model, part, reduction))
                else:
                    of = everything if setup.tokens_over == "all-ranks" else own
                    losses.append(data.loss(model, part, "sum") / data.tokens(of))
            loss = torch.stack(losses).mean() * FACTORS[setup.loss_times](world)
            (loss / setup.accumulation if setup.accumulation_divided else loss).backward()
        total += gradient(model)
    return total / world if setup.parallelism in ("ddp", "hybrid") else total


def epoch_of(setup: Setup) -> dict[str, int]:
    """From torch's sampler and loader: an epoch as far as these decide on it."""
    dataset: Any = list(range(setup.examples or 0))
    seen: list[int] = []
    for rank in range(setup.processes):
        sampler: Any = DistributedSampler(dataset, setup.processes, rank)
        loader: Any = DataLoader(dataset, setup.batch, sampler=sampler)
        batches = [one.tolist() for one in loader]
        seen += [example for one in batches for example in one]
    return {
        "examples_each": len(sampler),
        "micro_batches": len(batches),
        "last_batch": len(batches[-1]),
        "steps": -(-len(batches) // setup.accumulation),
        "repeated": len(seen) - len(dataset),
    }


@hypothesis_settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(setups())
def test_a_simulation_agrees(setup: Setup) -> None:
    explanation = explain(setup)
    data = Data(setup.effective_batch, setup.loss == "token-mean")
    g = big_batch(data, setup.effective_batch)
    held = simulated(setup, data)
    if explanation.is_multiple:
        torch.testing.assert_close(held, float(explanation.factor) * g, rtol=1e-9, atol=1e-12)
    else:
        agree_on_unequal_counts(setup, data, held, g)
    known, rates = setup.known_good, explanation.learning_rates
    if known is not None and rates is not None and explanation.is_multiple:
        if setup.optimizer == "sgd":  # for the same mean gradient, the step is as long as it was
            whole = known.batch if known.loss == "sum" else 1
            alone = float(known.learning_rate) * whole * g
            torch.testing.assert_close(float(rates.same_step) * held, alone, rtol=1e-9, atol=1e-12)
        assert rates.linear == rates.same_step * setup.effective_batch / known.batch
    if setup.examples is not None:
        assert epoch_of(setup).items() <= vars(setup.epoch).items()
    assert str(explanation)


def agree_on_unequal_counts(setup: Setup, data: Data, held: Tensor, g: Tensor) -> None:
    """The explanation says by how much each example counts, or that token counts decide it. What it
    advises mends both.
    """
    explanation = explain(setup)
    if setup.loss != "token-mean":
        weights = [share for size, share in explanation.shares for _ in range(size)]
        model = new_model()
        for example in range(setup.effective_batch):
            weight = float(weights[example % setup.batch]) / setup.effective_batch
            (weight * data.loss(model, slice(example, example + 1), "mean")).backward()
        torch.testing.assert_close(held, gradient(model), rtol=1e-9, atol=1e-12)
    elif len(set(setup.loss_sizes(setup.batch))) == 1:
        full = Data(setup.effective_batch, True)
        full.labels[full.labels == PADDING] = 0  # equal counts: then it is the named multiple
        whole = big_batch(full, setup.effective_batch)
        equal = float(explanation.factor) * whole
        torch.testing.assert_close(simulated(setup, full), equal, rtol=1e-9, atol=1e-12)
    mended = explanation.mended
    assert mended is not None
    assert mended.is_multiple
    assert setup.loss != "token-mean" or mended.factor == 1
    followed = simulated(replace(mended.setup, loss_times="1"), data)
    followed *= float(mended.setup.loss_factor)
    torch.testing.assert_close(followed, float(mended.factor) * g, rtol=1e-9, atol=1e-12)


def weights_in_the_steps(setup: Setup, last_divisor: int) -> list[Tensor]:
    """How often each example's gradient is in that of every step, with torch's own sampler.

    ``last_divisor``: by what accumulation divides in a shorter last step.
    """
    examples, ranks = setup.examples or 0, setup.processes
    averaged = 1 if setup.parallelism == "all-reduce-sum" else ranks
    steps: list[Tensor] = []
    for rank in range(ranks):
        data: Any = range(examples)
        sampler: Any = DistributedSampler(data, ranks, rank, shuffle=False)
        loader: Any = DataLoader(data, setup.batch, sampler=sampler)
        for number, batch in enumerate(loader):
            step, first = divmod(number, setup.accumulation)
            if rank == 0 and first == 0:
                steps.append(torch.zeros(examples, dtype=torch.double))
            whole = (step + 1) * setup.accumulation <= len(loader)
            divisor = (setup.accumulation if whole else last_divisor) if last_divisor else 1
            inside = setup.parallelism == "data-parallel-loss-inside"
            parts = batch.chunk(setup.ranks_per_node) if inside else [batch]
            for part in parts:
                share = 1 / (divisor * averaged * len(parts))
                share /= 1 if setup.loss == "sum" else len(part)
                steps[step].index_add_(0, part, torch.full((len(part),), share).double())
    return steps


@hypothesis_settings(max_examples=EXAMPLES, deadline=None)
@given(
    parallelism=st.sampled_from(["ddp", "all-reduce-sum", "data-parallel-loss-inside"]),
    batch=st.integers(1, 6),
    accumulation=st.integers(1, 3),
    divided=st.booleans(),
    losses=st.tuples(st.sampled_from(["mean", "sum"]), st.sampled_from(["mean", "sum", None])),
    last=st.integers(1, 60),
)
def test_the_last_step_counts_examples_as_it_says(
    parallelism: Any, batch: int, accumulation: int, divided: bool, losses: Any, last: int
) -> None:
    """With the learning rate that makes the update of a whole step one device's."""
    loss, known_loss = losses
    fields: dict[str, Any] = {"batch": batch, "accumulation": accumulation, "loss": loss}
    fields |= {"ranks_per_node": 3, "parallelism": parallelism}
    fields["accumulation_divided"] = divided if accumulation > 1 else None
    whole = Setup(**fields).effective_batch
    if known_loss:
        fields["known_good"] = KnownGood(whole, Fraction(1), known_loss)
    setup = Setup(**fields, examples=whole + last)
    explanation, epoch = explain(setup), setup.epoch
    assume(explanation.is_multiple)
    assert epoch is not None
    assume(epoch.repeated == 0)
    sums = (known_loss or loss) == "sum"
    divides = divided and accumulation > 1
    for divisor in (accumulation, epoch.rest or accumulation) if divides else (0,):
        found = weights_in_the_steps(setup, divisor)
        rate = (1.0 if sums else 1 / whole) / found[0].max()
        on_one_device = 1.0 if sums else 1 / epoch.last_step
        counted = found[-1][found[-1] > 0] * rate / on_one_device
        said = last_step_counts(explanation, divisor)
        assert float(min(said)) == pytest.approx(float(counted.min()))
        assert float(max(said)) == pytest.approx(float(counted.max()))
