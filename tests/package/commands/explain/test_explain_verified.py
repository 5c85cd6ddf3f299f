"""Ranks compute what is explained, for every parallelism and loss, and contradict what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args

import pytest

from ddp_equivalence.commands.explain import KnownGood, LossFactor, Setup, explain
from ddp_equivalence.commands.explain.explanation import (
    ONE_PROCESS,
    Loss,
    Optimizer,
    Parallelism,
    TokensOver,
)
from ddp_equivalence.commands.explain.verification import verify
from ddp_equivalence.commands.explain.verified import trained_stand_ins

pytestmark = pytest.mark.self_check

LAYOUTS = ((1, 2), (2, 2), (1, 4))
LOSSES: tuple[Loss, ...] = ("mean", "sum", "token-mean")
SEVERAL: tuple[Parallelism, ...] = ("ddp", "hybrid", "all-reduce-sum")
REPLICATED: tuple[Parallelism, ...] = ("data-parallel", "data-parallel-loss-inside")


def setups() -> Iterator[Setup]:
    """Setups with batch 4 and with batch 5, which is uneven over replicas.

    Each has one micro-batch and then three, whose losses are divided in every other setup.
    """
    combined = [(p, layout) for p in SEVERAL for layout in LAYOUTS]
    combined += [(p, layout) for p in REPLICATED for layout in LAYOUTS if layout[0] == 1]
    combined += [("none", (1, 1))]
    for number, (parallelism, (nodes, ranks)) in enumerate(combined):
        for place, loss in enumerate(LOSSES):
            one = Setup(
                batch=4 if (number + place) % 2 else 5,
                nodes=nodes,
                ranks_per_node=ranks,
                loss=loss,
                parallelism=parallelism,
            )
            yield one
            divided = (number + place) % 2 == 0
            yield replace(one, accumulation=3, accumulation_divided=divided)


def name(setup: Setup) -> str:
    layout = f"{setup.nodes}x{setup.ranks_per_node}"
    divided = {None: "", True: "-divided", False: "-not-divided"}[setup.accumulation_divided]
    return f"{setup.parallelism}-{setup.loss}-{layout}-{setup.batch}{divided}"


@pytest.mark.parametrize("setup", list(setups()), ids=name)
def test_ranks_hold_what_is_explained(setup: Setup) -> None:
    found = verify(explain(setup))
    assert found.outcome == "agrees", found
    assert found.scaled == ()
    alone = setup.parallelism in ONE_PROCESS
    assert found.setup.processes == 1 if alone else found.setup.processes > 0


@pytest.mark.parametrize("wrong", [2, Fraction(1, 4), Fraction(1001, 1000)])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_wrong_prediction_is_seen(loss: Loss, wrong: Fraction) -> None:
    right = explain(Setup(batch=4, ranks_per_node=2, loss=loss))
    found = verify(replace(right, factor=right.factor * wrong))
    assert found.outcome == "differs", found


@pytest.mark.parametrize("parallelism", SEVERAL)
@pytest.mark.parametrize("tokens_over", get_args(TokensOver))
def test_ranks_count_tokens_as_it_is_explained(
    parallelism: Parallelism, tokens_over: TokensOver
) -> None:
    setup = Setup(
        batch=3,
        nodes=2,
        ranks_per_node=2,
        loss="token-mean",
        tokens_over=tokens_over,
        loss_times=LossFactor.read("world-size/3"),
        parallelism=parallelism,
        accumulation=2,
        accumulation_divided=False,
        optimizer="adam",
    )
    explanation = explain(setup)
    assert explanation.is_multiple == (tokens_over == "all-ranks")
    found = verify(explanation)
    assert found.outcome == "agrees", found
    wrong = verify(replace(explanation, factor=explanation.factor * 2))
    assert wrong.outcome == "differs", wrong


def test_adam_trains_the_same_with_the_factor_on_eps() -> None:
    setup = Setup(
        batch=4,
        ranks_per_node=2,
        parallelism="all-reduce-sum",
        optimizer="adam",
        known_good=KnownGood.read("8@0.01"),
    )
    right = explain(setup)
    gradient, training = verify(right).comparisons
    assert (gradient.outcome, training.outcome) == ("agrees", "agrees")
    assert "learning rate 0.01 and eps 0.001 x 2, one big batch with 0.01 and 0.001" in (
        training.what
    )
    gradient, training = verify(replace(right, mended_factor=Fraction(1))).comparisons
    assert (gradient.outcome, training.outcome) == ("agrees", "differs")


@pytest.mark.parametrize(
    "known", ["4@0.1", "32@0.1", pytest.param("2@0.1", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_stand_in_trains_with_the_rates_for_another_batch(
    optimizer: Optimizer, known: str
) -> None:
    setup = Setup(batch=16, optimizer=optimizer, known_good=KnownGood.read(known))
    rates = explain(setup).learning_rates
    assert rates is not None
    outcomes = [one.outcome for one in trained_stand_ins(setup, rates)]
    assert outcomes == ["agrees"] * (2 if optimizer == "sgd" else 3)
    for name in ("linear", "square_root"):
        wrong = replace(rates, **{name: getattr(rates, name) * 2})
        assert "differs" in [one.outcome for one in trained_stand_ins(setup, wrong)]


def test_unequal_counts_taken_for_a_multiple_are_seen() -> None:
    right = explain(Setup(batch=5, ranks_per_node=2, parallelism="data-parallel-loss-inside"))
    assert not right.is_multiple
    assert verify(right).outcome == "agrees"
    assert verify(replace(right, is_multiple=True)).outcome == "differs"


def test_a_multiple_taken_for_unequal_counts_is_seen() -> None:
    right = explain(Setup(batch=4, ranks_per_node=2))
    assert verify(replace(right, is_multiple=False)).outcome == "differs"


def test_a_wrong_learning_rate_trains_other_weights() -> None:
    known = KnownGood.read("8@0.05")
    right = explain(Setup(batch=4, ranks_per_node=2, loss="sum", known_good=known))
    assert right.learning_rates is not None
    gradient, training = verify(right).comparisons
    assert (gradient.outcome, training.outcome) == ("agrees", "agrees")
    assert "with learning rate 0.0125, one big batch with 0.05" in training.what
    wrong = replace(right.learning_rates, same_step=right.learning_rates.same_step * 2)
    gradient, training = verify(replace(right, learning_rates=wrong)).comparisons
    assert (gradient.outcome, training.outcome) == ("agrees", "differs")


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("loss", ["mean", "token-mean"])
def test_what_is_mended_trains_with_the_learning_rate_that_is_given_for_it(
    loss: Loss, divided: bool
) -> None:
    setup = Setup(
        batch=8,
        ranks_per_node=3,
        parallelism="data-parallel-loss-inside",
        loss=loss,
        accumulation=2,
        accumulation_divided=divided,
        known_good=KnownGood.read("16@0.1"),
    )
    right = explain(setup)
    assert right.learning_rates is not None
    outcomes = [one.outcome for one in verify(right).comparisons]
    assert outcomes == ["agrees", "agrees", "agrees"]
    wrong = replace(right.learning_rates, same_step=right.learning_rates.same_step * 2)
    outcomes = [one.outcome for one in verify(replace(right, learning_rates=wrong)).comparisons]
    assert outcomes == ["agrees", "agrees", "differs"]
    outcomes = [
        one.outcome for one in verify(replace(right, mended_factor=Fraction(3))).comparisons
    ]
    assert outcomes == ["agrees", "differs", "agrees"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"known_good": KnownGood.read("1000@0.1")},
            "Not run: the square-root and the linear learning rate (the stand-in trains with",
        ),
        ({"parallelism": "all-reduce-sum"}, "Not run: weight decay, clipping and momentum."),
        (
            {"known_good": KnownGood.read("4@0.1"), "optimizer": "adam"},
            "Not run: what Adam's other betas and eps are good for.",
        ),
        (
            {"parallelism": "all-reduce-sum", "optimizer": "adam"},
            "Not run: weight decay and clipping.",
        ),
        ({"examples": 100}, "Not run: the epoch."),
        ({"known_good": KnownGood.read("8@5")}, "one big batch with 0.1 in place of your 5:"),
    ],
)
def test_what_is_not_run_is_said(fields: dict[str, Any], says: str) -> None:
    found = verify(explain(Setup(batch=4, ranks_per_node=2, **fields)))
    assert found.outcome == "agrees", found
    assert says in " ".join(str(found).split())
    assert found.as_data()["not_run"] == list(found.not_run)


def test_nothing_is_left_out_where_all_is_run() -> None:
    setup = Setup(batch=4, ranks_per_node=2, known_good=KnownGood.read("8@0.1"))
    text = str(verify(explain(setup)))
    assert "Not run" not in text
    assert "in place of" not in text


def test_parameters_without_a_gradient_do_not_hide_the_others() -> None:
    # One token: the GRU's hidden weights meet a hidden state of zero.
    found = verify(explain(Setup(batch=1, loss="token-mean", parallelism="none")))
    assert found.outcome == "agrees", found
    assert found.comparisons[0].measured == "1 g"


def test_a_large_setup_is_verified_on_fewer_ranks_and_says_so() -> None:
    setup = Setup(batch=256, nodes=16, ranks_per_node=8, accumulation=64, accumulation_divided=True)
    found = verify(explain(setup))
    assert found.outcome == "agrees", found
    assert (found.setup.nodes, found.setup.processes) == (2, 8)
    assert found.scaled == (
        "nodes x ranks per node 2 x 4 instead of 16 x 8",
        "32 micro-batches instead of 64",
        "batch 6 instead of 256",
    )
    assert "Scaled down: nodes" in str(found)


@pytest.mark.parametrize("batch", [1000, 1001, 998, 3])
def test_a_smaller_batch_is_as_even_over_replicas(batch: int) -> None:
    setup = Setup(batch=batch, ranks_per_node=4, parallelism="data-parallel-loss-inside")
    right = explain(setup)
    found = verify(right)
    assert found.outcome == "agrees", found
    assert explain(found.setup).is_multiple == right.is_multiple
    assert found.setup.batch <= 12
