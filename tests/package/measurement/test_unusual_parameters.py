"""Parameters and gradients of unusual kinds are judged right, or named in a clear message."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.package.own_cases import build_model, loss, own_case, right_step


def reduced(model: nn.Module, shard: Any) -> dict[str, Tensor]:
    right_step(model, shard, None)  # type: ignore[arg-type]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def transposed(model: nn.Module, shard: Any, rank: Rank) -> Any:
    return {
        n: g.t().contiguous().t() if g.ndim == 2 else g for n, g in reduced(model, shard).items()
    }


def negated_views(model: nn.Module, shard: Any, rank: Rank) -> Any:
    """The imaginary part of a conjugate is a view with torch's negative bit."""
    gradients = reduced(model, shard)
    return {n: torch.complex(g, -g).conj().imag for n, g in gradients.items()}


def with_a_graph(model: nn.Module, shard: Any, rank: Rank) -> Any:
    return {n: g.requires_grad_().clone() for n, g in reduced(model, shard).items()}


def in_inference_mode(model: nn.Module, shard: Any, rank: Rank) -> Any:
    gradients = reduced(model, shard)
    with torch.inference_mode():
        return {n: g * 1 for n, g in gradients.items()}


@pytest.mark.parametrize("step", [transposed, negated_views, with_a_graph, in_inference_mode])
def test_gradients_in_any_memory_layout_are_the_same(step: Any) -> None:
    verdict = check(own_case(), step, steps=2)
    assert verdict.outcome == "same", verdict


class Expanded(nn.Module):
    """The gradient of the bias of a sum is an expanded view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(5, 3), nn.Parameter(torch.zeros(4, 3))
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.scale * self.linear(rows) + self.bias.sum(0) + self.empty.sum()
        return out


def by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.contiguous()
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


@pytest.mark.parametrize(
    ("step", "compare"), [(by_hand, "gradients"), (right_step, "update")], ids=["hand", "ddp"]
)
def test_expanded_gradients_scalars_and_empty_parameters_are_compared(
    step: Any, compare: Any
) -> None:
    def step_and_optimizer(model: nn.Module, shard: Any, rank: Rank) -> None:
        step(model, shard, rank)
        if compare == "update":
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    verdict = check(own_case(model=Expanded), step_and_optimizer, compare=compare, lr=0.1)
    assert verdict.outcome == "same", verdict
    assert verdict.comparison is not None
    shapes = {one.name: one.shape for one in verdict.comparison.parameters}
    assert (shapes["scale"], shapes["empty"]) == ((), (0, 3))


def test_a_wrong_scalar_is_different() -> None:
    def doubles(model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)
        scale = model.get_parameter("scale").grad
        assert scale is not None
        scale *= 2

    verdict = check(own_case(model=Expanded), doubles)
    assert verdict.comparison is not None
    assert [one.name for one in verdict.comparison.differing] == ["scale"]


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.body.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows).tanh() - self.mean)  # type: ignore[no-any-return]


def unfreezes(model: nn.Module, shard: Any, rank: Rank) -> None:
    model.requires_grad_(True)
    right_step(model, shard, rank)


def freezes_the_head(model: nn.Module, shard: Any, rank: Rank) -> None:
    model.get_parameter("head.bias").requires_grad_(False)
    right_step(model, shard, rank)


class LowRank(nn.Module):
    """A linear layer that is frozen, and a trained correction beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.ones(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2, dtype=base.weight.dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + rows @ self.down.t() @ self.up.t()  # type: ignore[no-any-return]


def injects_low_rank(model: Any, shard: Any, rank: Rank) -> None:
    model.head = LowRank(model.head)
    right_step(model, shard, rank)


def removes_the_bias(model: Any, shard: Any, rank: Rank) -> None:
    model.head.bias = None
    right_step(model, shard, rank)


def unties(model: Any, shard: Any, rank: Rank) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())
    right_step(model, shard, rank)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).tanh())[:, :3]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "step", "says"),
    [
        (PartlyFrozen, unfreezes, "body.weight is (7, 5) float64, expected None"),
        (PartlyFrozen, freezes_the_head, "head.bias is None, expected (3,) float64"),
        (
            PartlyFrozen,
            injects_low_rank,
            "head.up (added by the step) is not a parameter of the model",
        ),
        (PartlyFrozen, injects_low_rank, "head.weight is None, expected (3, 7) float64"),
        (PartlyFrozen, removes_the_bias, "head.bias is missing"),
        (Tied, unties, "second.weight (added by the step) is not a parameter of the model"),
    ],
)
def test_other_parameters_than_the_big_batch_has_are_named(
    model: Any, step: Any, says: str
) -> None:
    verdict = check(own_case(model=model), step)
    assert verdict.outcome == "different"
    assert says in verdict.full_report()


@pytest.mark.parametrize("step", [unfreezes, freezes_the_head, injects_low_rank])
def test_other_parameters_are_named_in_updates_too(step: Any) -> None:
    def trains(model: nn.Module, shard: Any, rank: Rank) -> None:
        step(model, shard, rank)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.optim.SGD(trained, lr=0.1).step()

    verdict = check(own_case(model=PartlyFrozen), trains, compare="update", lr=0.1)
    assert verdict.outcome == "different", verdict
    assert verdict.comparison is not None
    assert verdict.comparison.structure


def test_several_steps_with_parameters_that_the_step_adds_are_compared() -> None:
    def adds_in_the_first_step(model: Any, shard: Any, rank: Rank) -> None:
        if not isinstance(model.head, LowRank):
            model.head = LowRank(model.head)
        right_step(model, shard, rank)

    verdict = check(own_case(model=PartlyFrozen), adds_in_the_first_step, steps=2)
    assert verdict.outcome == "different", verdict


def test_a_frozen_copy_that_the_step_keeps_on_the_model_is_no_difference() -> None:
    def keeps_an_average(model: Any, shard: Any, rank: Rank) -> None:
        if not hasattr(model, "average"):
            model.average = copy.deepcopy(model).requires_grad_(False)
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()

    for steps in (1, 3):
        verdict = check(own_case(model=PartlyFrozen), keeps_an_average, steps=steps)
        assert verdict.outcome == "same", verdict


def test_weight_norm_that_the_step_applies_is_named() -> None:
    def applies(model: Any, shard: Any, rank: Rank) -> None:
        nn.utils.parametrizations.weight_norm(model[0])
        right_step(model, shard, rank)

    verdict = check(own_case(model=build_model), applies)
    assert verdict.outcome == "different"
    assert "0.weight is missing" in verdict.full_report()
    report = " ".join(verdict.full_report().split())
    assert "(added by the step) is not a parameter of the model" in report
