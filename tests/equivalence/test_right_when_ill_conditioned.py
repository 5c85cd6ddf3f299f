"""Right steps where rounding is large beside the gradient, or values lie far apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Rank, assert_equivalent
from tests.equivalence.plain_steps import average, by_hand, ddp
from tests.equivalence.small_regression import (
    EXAMPLES,
    OUTPUTS,
    ROW,
    Batch,
    Model,
    loss,
    make_batch,
    regression,
)
from tests.equivalence.unusual_models import KeysOfAttention, dropout_in_eval

DTYPES = (torch.float64, torch.float32, torch.bfloat16)

every_way = pytest.mark.parametrize(
    ("step", "layout"), [(ddp, "1+2"), (by_hand, "2x2")], ids=["ddp", "by hand"]
)


def scaled(factor: float) -> Model:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(ROW, 7), nn.ReLU(), nn.Linear(7, OUTPUTS))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        return model

    build.__name__ = f"weights_times_{factor:g}"
    return build


def twenty_layers(bias: bool = False) -> nn.Module:
    """Every layer doubles its input: the gain is 2 to the power of 20."""
    layers = [nn.Linear(ROW, ROW, bias=bias) for _ in range(20)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain=2.0)
    return nn.Sequential(*layers, nn.Linear(ROW, OUTPUTS, bias=bias))


def twenty_layers_with_biases() -> nn.Module:
    """The gradient of a late bias is a millionth of the gradient of the weights beside it."""
    return twenty_layers(bias=True)


def nearly_singular() -> nn.Module:
    """The rows of the first weight differ by about a thousandth only."""
    model = nn.Sequential(nn.Linear(ROW, ROW, bias=False), nn.Linear(ROW, OUTPUTS, bias=False))
    with torch.no_grad():
        next(model.parameters()).copy_(torch.ones(ROW, ROW) + 1e-3 * torch.randn(ROW, ROW))
    return model


@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "model",
    [scaled(1e3), scaled(1e-3), twenty_layers, nearly_singular, KeysOfAttention],
    ids=lambda model: model.__name__,
)
def test_an_ill_conditioned_model_is_no_fault(
    model: Model, step: Any, dtype: torch.dtype, layout: str
) -> None:
    assert_equivalent(regression(layout, model, dtype=dtype), step)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32", "bfloat16"])
@every_way
def test_a_small_gradient_beside_large_ones_is_judged_by_its_own_rounding(
    step: Any, layout: str, dtype: torch.dtype
) -> None:
    assert_equivalent(regression(layout, twenty_layers_with_biases, dtype=dtype), step)


def with_kinks(model: nn.Module, batch: Batch) -> Tensor:
    return F.smooth_l1_loss(model(batch["rows"]), batch["targets"], beta=1e-3)


def tiny_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 1e-12 * loss(model, batch)


def loss_beside_a_large_constant(model: nn.Module, batch: Batch) -> Tensor:
    return loss(model, batch) + 1e6


def saturated(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(1e3 * model(batch["rows"]), batch["targets"].argmax(dim=1))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["float64", "float32"])
@pytest.mark.parametrize("loss", [with_kinks, tiny_loss, loss_beside_a_large_constant, saturated])
def test_a_loss_of_another_size_or_shape_is_no_fault(loss: Any, dtype: torch.dtype) -> None:
    def averaged(model: nn.Module, shard: Batch, rank: Rank) -> None:
        loss(model, shard).backward()
        average(model, rank)

    assert_equivalent(regression("1+2", dropout_in_eval, loss=loss, dtype=dtype), averaged)


def over_decades(decades: float) -> Callable[[torch.Generator], Batch]:
    """A batch whose examples differ in size by up to this many powers of ten."""

    def batch(generator: torch.Generator) -> Batch:
        exponents = torch.linspace(-decades / 2, decades / 2, EXAMPLES, dtype=torch.float64)
        exponents = exponents[torch.randperm(EXAMPLES, generator=generator)]
        return {name: values * 10 ** exponents[:, None] for name, values in plain.items()}

    plain = make_batch(torch.Generator().manual_seed(1))
    return batch


@every_way
@pytest.mark.parametrize(("dtype", "decades"), [(torch.float64, 40), (torch.float32, 30)])
def test_sums_over_many_decades_are_no_fault(
    dtype: torch.dtype, decades: float, step: Any, layout: str
) -> None:
    case = regression(layout, one_layer, batch=over_decades(decades), dtype=dtype)
    assert_equivalent(case, step)


def one_layer() -> nn.Module:
    return nn.Linear(ROW, OUTPUTS)


def nearly_trained(distance: float) -> tuple[Model, Callable[[torch.Generator], Batch]]:
    """A model near its optimum, and its batch: the gradients of the examples almost cancel.

    ``distance``: from every weight to its optimum.
    """
    rows = torch.randn(EXAMPLES, ROW, generator=torch.Generator().manual_seed(2)).double()
    noise = torch.randn(EXAMPLES, OUTPUTS, generator=torch.Generator().manual_seed(3)).double()
    residual = noise - rows @ torch.linalg.lstsq(rows, noise).solution

    def model() -> nn.Module:
        return nn.Linear(ROW, OUTPUTS, bias=False).double()

    def batch(generator: torch.Generator) -> Batch:
        weight = model_weight()
        targets = rows @ weight.T + residual + distance * rows @ torch.ones(ROW, OUTPUTS).double()
        return {"rows": rows, "targets": targets}

    def model_weight() -> Tensor:
        torch.manual_seed(0)
        return model().get_parameter("weight").detach()

    return model, batch


@every_way
@pytest.mark.parametrize(
    ("dtype", "distance"), [(torch.float64, 1e-3), (torch.float64, 1e-7), (torch.float32, 1e-3)]
)
def test_gradients_that_cancel_are_no_fault(
    dtype: torch.dtype, distance: float, step: Any, layout: str
) -> None:
    model, batch = nearly_trained(distance)
    assert_equivalent(regression(layout, model, batch=batch, dtype=dtype), step)
