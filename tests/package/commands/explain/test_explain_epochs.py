"""The text on an epoch: its last step, steps that are never whole, and repeated examples."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis.strategies import booleans, integers, sampled_from, tuples
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from ddp_equivalence.commands.explain import KnownGood, Setup, explain
from ddp_equivalence.commands.explain.last_step import shares
from ddp_equivalence.commands.explain.text import summary_text, unlike_one_device

INSIDE = {"parallelism": "data-parallel-loss-inside", "ranks_per_node": 4, "batch": 16}
SUMS_INSIDE = INSIDE | {"loss": "sum"}
NOT_DIVIDED = {"accumulation": 3, "accumulation_divided": False}
DIVIDED = {"accumulation": 3, "accumulation_divided": True}
FOUR = {"ranks_per_node": 4, "batch": 4}


def said(**fields: Any) -> str:
    """The text on the epoch, on one line."""
    return " ".join(str(explain(Setup(**fields))).partition("  Epoch: ")[2].split())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (FOUR | NOT_DIVIDED | {"examples": 96}, "2 steps of 3 micro-batches."),
        (
            {"batch": 4, "ranks_per_node": 2, "loss": "sum", **NOT_DIVIDED, "examples": 91},
            "The gradient of the last step is as it should be, apart from the repeated examples: a",
        ),
        (
            {"batch": 4, "ranks_per_node": 2, "loss": "sum", **NOT_DIVIDED, "examples": 101},
            "The gradient of that step is as it should be, apart from the repeated examples: a sum",
        ),
        (
            {"batch": 4, "loss": "sum", "examples": 7, "known_good": KnownGood.read("4@1")},
            "The last step has 3 examples: its gradient is 3/4 as large as it should be.",
        ),
        (
            {"batch": 8, "examples": 12, "known_good": KnownGood.read("8@1", "sum")},
            "The last step has 4 examples: its gradient is 2 times as large as it should be.",
        ),
        # 2 examples in 2 replicas: the mean of two sums over 1; of sums over 4 before.
        (
            SUMS_INSIDE | {"examples": 34},
            "The last step has 2 examples: its gradient is 2 times as large as it should be.",
        ),
        # 4 examples: the mean of four sums over 1.
        (SUMS_INSIDE | {"examples": 36}, "The gradient of the last step is as it should be: a sum"),
        (
            SUMS_INSIDE | NOT_DIVIDED | {"examples": 82},
            "counts once in a loss over 4 and 2 times in a loss over 1; it should count once.",
        ),
        (INSIDE | {"examples": 37}, "counts 5/6 times in a loss over 2 and 5/3 times in a loss"),
        (
            {"batch": 5, **DIVIDED, "examples": 43},
            "With drop_last, 2 are left to divide by there.",
        ),
        ({"batch": 5, **DIVIDED, "examples": 48}, "drop_last leaves the last batch out."),
        (
            {"batch": 5, **DIVIDED, "examples": 97, "drop_last": True},
            "One device with drop_last does not take that step.",
        ),
        (
            {"batch": 2, **DIVIDED, "examples": 14, "loss": "sum"},
            "as it should be, if you divide by 3 there, too: a sum over fewer examples",
        ),
        (
            {"ranks_per_node": 2, "batch": 4, "examples": 30, "sampler": "even-batches"},
            "30 examples, 16 a rank (full batches): 4 batches of 4, and as many steps.",
        ),
        (
            {"batch": 5, "ranks_per_node": 3, "examples": 45, "accumulation": 4}
            | {"parallelism": "data-parallel-loss-inside", "accumulation_divided": True},
            "Divide by 1 in that step: if you divide by 4, its gradient is 1/4 as large as it",
        ),
        (FOUR | {"examples": 10}, "10 examples, 3 a rank (DistributedSampler): 1 batch, of 3: 1 "),
        ({"batch": 64, "examples": 25}, "25 examples: 1 batch, of 25: 1 step."),
        ({"batch": 64, "examples": 64}, "64 examples: 1 batch, of 64: 1 step."),
        ({"batch": 4, "examples": 8}, "8 examples: 2 batches of 4, and as many steps."),
        (
            FOUR | {"accumulation": 8, "accumulation_divided": True, "examples": 80},
            "1 step, of 5 micro-batches, if the loop steps at the end of an epoch; none if it",
        ),
        (
            FOUR | {"accumulation": 8, "accumulation_divided": False, "examples": 80},
            "That step has 80 examples: its gradient is 5/8 as large as it should be.",
        ),
        (
            {"batch": 1, "ranks_per_node": 8, "examples": 3},
            "Every example is seen 2 or 3 times, so",
        ),
        (
            {"batch": 1, "ranks_per_node": 9, "examples": 3},
            "Every example is seen 3 times, so that",
        ),
        ({"batch": 1, "ranks_per_node": 3, "examples": 5}, "1 example is repeated, so that every"),
        (
            {"batch": 64, "examples": 1001, "known_good": KnownGood.read("32@0.1")},
            "With the known batch of 32 an epoch has 32 steps.",
        ),
        (
            {
                "batch": 64,
                "examples": 1001,
                "known_good": KnownGood.read("32@0.1"),
                "drop_last": True,
            },
            "With the known batch of 32 an epoch has 31 steps.",
        ),
    ],
)
def test_an_epoch_is_told_as_it_is(fields: dict[str, Any], says: str) -> None:
    assert says in said(**fields)


@pytest.mark.parametrize(
    ("fields", "never"),
    [
        (INSIDE | {"examples": 36}, "counts"),
        ({"batch": 8, "examples": 5, "known_good": KnownGood.read("8@1", "sum")}, "drop_last"),
        (INSIDE | {"examples": 36}, "drop_last"),
        (INSIDE | {"examples": 37, "drop_last": True}, "last step"),
        (SUMS_INSIDE | {"examples": 32}, "last step"),
        (SUMS_INSIDE | NOT_DIVIDED | {"examples": 100}, "drop_last"),
    ],
)
def test_an_even_or_a_whole_last_batch_is_not_warned_of(fields: dict[str, Any], never: str) -> None:
    assert never not in said(**fields)


@pytest.mark.parametrize(
    ("fields", "largest"),
    [
        ({"batch": 64, "ranks_per_node": 4, "examples": 100}, 100),
        ({"batch": 64, "ranks_per_node": 4, "examples": 256}, 256),
        ({"batch": 64, "ranks_per_node": 4, "examples": 257}, 256),
        (FOUR | {"accumulation": 8, "accumulation_divided": True, "examples": 80}, 80),
        (FOUR | {"accumulation": 8, "accumulation_divided": True, "examples": 126}, 128),
        (FOUR | {"accumulation": 8, "accumulation_divided": True, "examples": 121}, 124),
        (FOUR | {"accumulation": 8, "accumulation_divided": True, "examples": 129}, 128),
    ],
)
def test_a_batch_that_no_step_reaches_is_told_first(fields: dict[str, Any], largest: int) -> None:
    found = explain(Setup(**fields, known_good=KnownGood.read("256@0.1")))
    assert found.epoch is not None
    assert found.epoch.largest_step == largest
    whole = found.effective_batch
    says = f"No step has all {whole} examples: the largest has {largest}."
    text = " ".join(str(found).split())
    assert (f"Epoch: {says}" in text) is (largest < whole)
    assert ("which no step of an epoch has" in text.partition(".")[0]) is (largest < whole)


def test_rates_for_another_batch_are_not_for_a_step_that_is_smaller() -> None:
    setup = Setup(ranks_per_node=4, batch=4, examples=12, known_good=KnownGood.read("8@0.1"))
    says = "The learning rates above are not for such a step."
    assert says in said(**FOUR, examples=12, known_good=KnownGood.read("8@0.1"))
    assert says not in said(**FOUR, examples=12, known_good=KnownGood.read("16@0.1"))
    short = " ".join(summary_text(explain(setup)).split())
    assert "the largest is of 12 examples, for which the rates are not meant" in short


def test_fewer_examples_than_ranks_are_dealt_again_as_often_as_is_said() -> None:
    samplers: list[Any] = [DistributedSampler([0, 1, 2], 8, rank) for rank in range(8)]  # type: ignore[arg-type]
    dealt = [example for sampler in samplers for example in sampler]
    assert {dealt.count(example) for example in range(3)} == {2, 3}
    epoch = explain(Setup(batch=1, ranks_per_node=8, examples=3)).epoch
    assert epoch is not None
    assert epoch.repeated == len(dealt) - 3


def weights_in_the_steps(setup: Setup, last_divisor: int = 0) -> list[Tensor]:
    """How often each example's gradient is in that of every step, with torch's own sampler.

    ``last_divisor``: by what accumulation divides in a shorter last step, if not as in the others.
    """
    examples, ranks = setup.examples or 0, setup.processes
    averaged = 1 if setup.parallelism == "all-reduce-sum" else ranks
    steps: list[Tensor] = []
    for rank in range(ranks):
        data: Any = range(examples)
        sampler: Any = DistributedSampler(data, ranks, rank, shuffle=False)
        loader: Any = DataLoader(data, setup.batch, sampler=sampler, drop_last=setup.drop_last)
        for number, batch in enumerate(loader):
            step, first = divmod(number, setup.accumulation)
            if rank == 0 and first == 0:
                steps.append(torch.zeros(examples, dtype=torch.double))
            divisor = setup.accumulation if setup.accumulation_divided else 1
            if last_divisor and (step + 1) * setup.accumulation > len(loader):
                divisor = last_divisor
            inside = setup.parallelism == "data-parallel-loss-inside"
            parts = batch.chunk(setup.ranks_per_node) if inside else [batch]
            for part in parts:
                share = 1 / (divisor * averaged * len(parts))
                share /= 1 if setup.loss == "sum" else len(part)
                steps[step].index_add_(0, part, torch.full((len(part),), share).double())
    return steps


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    parallelism=sampled_from(["ddp", "all-reduce-sum", "data-parallel-loss-inside"]),
    batch=integers(1, 6),
    accumulation=integers(1, 3),
    divided=booleans(),
    losses=tuples(sampled_from(["mean", "sum"]), sampled_from(["mean", "sum", None])),
    last=integers(1, 60),
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
    explanation = explain(setup)
    assume(explanation.is_multiple)
    assert explanation.epoch is not None
    sums = (known_loss or loss) == "sum"
    rest = explanation.epoch.rest
    for divisor in {accumulation, rest} - {0} if divided and accumulation > 1 else {0}:
        found = weights_in_the_steps(setup, divisor)
        rate = (1.0 if sums else 1 / whole) / found[0].max()
        on_one_device = 1.0 if sums else 1 / explanation.epoch.last_step
        counted = sorted((found[-1][found[-1] > 0] * rate / on_one_device).tolist())
        each = shares(explanation, explanation.epoch, divisor or 1)
        ranks = setup.processes
        said = [float(one.counts) for one in each for _ in range(one.losses * one.size * ranks)]
        repeated = explanation.epoch.repeated
        if not repeated:
            assert counted == pytest.approx(sorted(said))
        assert sum(counted) == pytest.approx(sum(said))


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    ranks=integers(1, 5),
    batch=integers(1, 4),
    accumulation=integers(1, 3),
    examples=integers(1, 60),
    drop_last=booleans(),
)
def test_the_updates_that_are_not_as_on_one_device_are_the_last_ones(
    ranks: int, batch: int, accumulation: int, examples: int, drop_last: bool
) -> None:
    fields: dict[str, Any] = {"batch": batch, "ranks_per_node": ranks, "examples": examples}
    fields |= {"accumulation": accumulation, "drop_last": drop_last}
    fields["accumulation_divided"] = True if accumulation > 1 else None
    assume(examples >= ranks)  # with fewer, each may count twice, which leaves the mean as it was
    assume(not drop_last or -(-examples // ranks) >= batch)
    setup = Setup(**fields)
    found = weights_in_the_steps(setup)
    one_batch = [
        torch.zeros(examples, dtype=torch.double).index_fill_(0, part, 1 / len(part))
        for part in torch.arange(examples).split(setup.effective_batch)
        if len(part) == setup.effective_batch or not drop_last
    ]
    one_batch += [torch.zeros(examples).double()] * (len(found) - len(one_batch))
    unlike = unlike_one_device(explain(setup))
    same = [torch.allclose(mine, theirs) for mine, theirs in zip(found, one_batch, strict=False)]
    assert same[: len(found) - unlike] == [True] * (len(found) - unlike)
    assert not any(same[len(found) - unlike :])


@pytest.mark.parametrize("count", [10**6, 10**10])
def test_an_epoch_of_very_many_micro_batches_is_explained_at_once(count: int) -> None:
    setup = Setup(batch=7, accumulation=count, accumulation_divided=True, examples=10 * count + 3)
    text = " ".join(summary_text(explain(setup)).split())
    assert "An epoch has 2 steps" in text
