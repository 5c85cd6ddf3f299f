"""The big batch is computed independently: against gradients worked out by hand in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case.build import build_batches, build_model
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.rounding import measure_rounding
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.measurement.request import CheckOptions
from ddp_equivalence.reference import big_batch
from tests.package.own_cases import own_case, right_step


def _linear(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    model, batch = build_model(case), build_batches(case)[0]
    weight, bias = (parameter.detach().numpy() for parameter in model.parameters())
    return batch["inputs"].numpy(), batch["targets"].numpy(), weight, bias


@pytest.mark.parametrize(("loss", "divides"), [("mse_mean", True), ("mse_sum", False)])
def test_the_gradient_of_a_linear_layer_is_the_one_worked_out_by_hand(
    loss: str, divides: bool
) -> None:
    case = Case(model="linear", loss=loss, layout="1x4")
    inputs, targets, weight, bias = _linear(case)
    residual = 2 * (inputs @ weight.T + bias - targets) / (targets.size if divides else 1)
    expected = big_batch(case).expected
    assert expected[0, "weight"] is not None
    assert expected[0, "bias"] is not None
    np.testing.assert_allclose(expected[0, "weight"].numpy(), residual.T @ inputs, rtol=1e-13)
    np.testing.assert_allclose(expected[0, "bias"].numpy(), residual.sum(0), rtol=1e-13)


def test_two_steps_move_the_weights_by_plain_sgd_as_worked_out_by_hand() -> None:
    case = Case(model="linear", loss="mse_mean", layout="1x2")
    batches = build_batches(case, steps=2)
    weight, bias = (p.detach().numpy().copy() for p in build_model(case).parameters())
    start = weight.copy()
    for batch in batches:
        inputs, targets = batch["inputs"].numpy(), batch["targets"].numpy()
        residual = 2 * (inputs @ weight.T + bias - targets) / targets.size
        weight, bias = weight - 0.1 * residual.T @ inputs, bias - 0.1 * residual.sum(0)
    update = big_batch(case, compare="update", training=Training(lr=0.1), steps=2).expected[
        0, "weight"
    ]
    assert update is not None
    np.testing.assert_allclose(update.numpy(), weight - start, rtol=1e-12)


def test_the_token_mean_counts_valid_tokens_only() -> None:
    case = Case(model="gru_tied", loss="token_mean", layout="1x2")
    batch, model = build_batches(case)[0], build_model(case)
    logits, targets = model(batch["inputs"]), batch["targets"]
    valid = targets >= 0
    chosen = logits.log_softmax(-1)[valid].gather(1, targets[valid][:, None])
    (-chosen.sum() / valid.sum()).backward()
    expected = big_batch(case).expected[0, "output.bias"]
    measured = dict(model.named_parameters())["output.bias"].grad
    assert expected is not None
    assert measured is not None
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=0)


PAIRS = [
    (model.name, loss.name)
    for model in MODELS.values()
    for loss in LOSSES.values()
    if model.output == loss.output
]


@pytest.mark.parametrize(("model_name", "loss_name"), PAIRS)
def test_the_totals_of_a_loss_over_its_normalisers_are_its_value(
    model_name: str, loss_name: str
) -> None:
    case = Case(model=model_name, loss=loss_name)
    model, batch, loss = build_model(case).eval(), build_batches(case)[0], LOSSES[loss_name]
    totals = loss.totals(model, model(batch["inputs"]), batch)
    terms = loss.normalisers(batch)
    parts = [total / term.count for total, term in zip(totals, terms, strict=True)]
    torch.testing.assert_close(torch.stack(parts).sum(), loss(model, batch), rtol=1e-12, atol=0)


def test_rounding_of_one_device_is_measured_in_the_precision_of_the_case() -> None:
    case = Case(model="mlp", loss="mse_mean", layout="1x4")
    relative = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = big_batch(replace(case, dtype=dtype))
        weight = found.expected[0, "0.weight"]
        assert weight is not None
        relative[dtype] = (
            measure_rounding(found).noise[0, "0.weight"].norm
            / float(weight.norm())
            / torch.finfo(dtype).eps
        )
    assert all(0.05 < in_eps < 20 for in_eps in relative.values()), relative


def test_inputs_are_rounded_before_the_truth_is_computed() -> None:
    """Otherwise the comparison would measure the rounding of the inputs."""
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(batch.detach().clone())
        value: Tensor = model(batch).square().mean()
        return value

    case = Case(
        model=lambda: nn.Linear(3, 2),
        loss=loss,
        batch=lambda generator: torch.randn(4, 3, generator=generator),
        dtype=torch.bfloat16,
    )
    big_batch(case)
    assert seen[0].dtype is torch.float64
    assert torch.equal(seen[0], seen[0].bfloat16().double())


def order_matters(model: str) -> bool:
    return measure_rounding(big_batch(Case(model=model, loss="mse_mean"))).order_matters


def test_a_model_that_depends_on_the_order_of_examples_is_noticed() -> None:
    assert order_matters("dropout")
    assert not order_matters("batch_norm")


def test_building_a_case_leaves_the_callers_random_state_alone() -> None:
    numpy_before, torch_before = repr(np.random.get_state()), torch.get_rng_state()
    big_batch(Case(model="dropout", loss="mse_mean"))
    assert repr(np.random.get_state()) == numpy_before
    assert torch.equal(torch.get_rng_state(), torch_before)


class WrongInStep:
    """A right step, whose gradient is doubled in one of the steps."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __call__(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        self.calls += 1
        right_step(model, shard, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1 + (self.calls == self.number)


def linear() -> nn.Module:
    return nn.Linear(5, 3)


def test_a_difference_after_the_big_batch_itself_diverges_is_not_judged() -> None:
    """The loss of a linear model grows by the same large factor in every step on any processor."""
    case, diverges = own_case(model=linear), CheckOptions(steps=3, lr=100.0)
    losses = big_batch(case, steps=3, training=Training(lr=100.0)).losses
    assert losses[1] > 1e3 * losses[0] > 0
    right, after, before = (check(case, WrongInStep(number), **diverges) for number in (0, 3, 1))
    assert right.outcome == "same", right
    assert after.unknown_because is UnknownBecause.REFERENCE_DIVERGES, after
    # What is wrong before it diverges is judged all the same.
    assert before.outcome == "different", before
