"""A step that returns something else than gradients is told what it returned and what is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, RankFailed, assert_equivalent, check
from tests.package.own_cases import loss, own_case

RIGHT = "A step returns None and leaves its gradients on the model"


def backward(model: nn.Module, shard: Any) -> Tensor:
    ddp = DistributedDataParallel(model)
    value = loss(ddp, shard)
    value.backward()
    return value


def returns_a_metric(model: nn.Module, shard: Any, rank: Rank) -> Any:
    return {"loss": backward(model, shard).item()}


def returns_metrics_as_tensors(model: nn.Module, shard: Any, rank: Rank) -> Any:
    value = backward(model, shard)
    return {"loss": value, "accuracy": torch.ones(())}


def returns_the_loss(model: nn.Module, shard: Any, rank: Rank) -> Any:
    return backward(model, shard)


def returns_a_tuple(model: nn.Module, shard: Any, rank: Rank) -> Any:
    return backward(model, shard), {"accuracy": 1.0}


def returns_a_list_of_gradients(model: nn.Module, shard: Any, rank: Rank) -> Any:
    backward(model, shard)
    return [parameter.grad for parameter in model.parameters()] * 100


def returns_named_parameters(model: nn.Module, shard: Any, rank: Rank) -> Any:
    backward(model, shard)
    return model.named_parameters()


def returns_numpy(model: nn.Module, shard: Any, rank: Rank) -> Any:
    backward(model, shard)
    return {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (returns_a_metric, "the step returned a dict with 'loss': a float"),
        (returns_metrics_as_tensors, "with the names loss, accuracy, none of which is a parameter"),
        (returns_the_loss, "the step returned a tensor of shape ()"),
        (returns_a_tuple, "the step returned a tuple (a tensor of shape (), a dict"),
        (returns_a_list_of_gradients, "the step returned a list (a tensor of shape (7, 5)"),
        (returns_named_parameters, "the step returned a generator"),
        (returns_numpy, "'0.weight': a numpy ndarray, which torch.from_numpy makes a tensor"),
    ],
)
def test_a_step_that_returns_no_gradients_is_told_what_would_be_right(step: Any, says: str) -> None:
    with pytest.raises(RankFailed) as caught:
        assert_equivalent(own_case(), step)
    text = " ".join(str(caught.value).replace("|", " ").split())
    assert says in text
    assert RIGHT in text
    what = caught.value.ends[0].what
    assert what.startswith("TypeError: the step returned")
    assert len(what) < 600


def test_a_dict_with_some_names_of_the_model_is_taken_for_gradients() -> None:
    def returns_some_and_a_metric(model: nn.Module, shard: Any, rank: Rank) -> Any:
        value = backward(model, shard)
        found = {n: p.grad for n, p in model.named_parameters() if "bias" in n}
        return found | {"loss": value}

    verdict = check(own_case(), returns_some_and_a_metric)
    assert verdict.outcome == "different"
    assert verdict.comparison is not None
    assert verdict.comparison.structure[:3] == (
        "rank 0: 0.weight is missing",
        "rank 0: 2.weight is missing",
        "rank 0: loss is not a parameter of the model",
    )


def test_an_empty_dict_is_no_gradient() -> None:
    def returns_nothing(model: nn.Module, shard: Any, rank: Rank) -> Any:
        backward(model, shard)
        return {}

    verdict = check(own_case(), returns_nothing)
    assert verdict.outcome == "unknown"
    assert "The step left no gradient on any rank" in str(verdict)


class Tied(nn.Module):
    """One weight under two names, of which ``named_parameters`` gives the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).tanh())[:, :3]  # type: ignore[no-any-return]


def both_names(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}


def returns_both_names(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None]:
    backward(model, shard)
    return both_names(model)


def returns_the_other_name(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None]:
    backward(model, shard)
    return {name: one for name, one in both_names(model).items() if name != "first.weight"}


def returns_buffers_too(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None]:
    backward(model, shard)
    return both_names(model) | dict(model.named_buffers())


@pytest.mark.parametrize("step", [returns_both_names, returns_the_other_name, returns_buffers_too])
def test_a_shared_parameter_may_be_returned_under_any_of_its_names(step: Any) -> None:
    verdict = check(own_case(model=Tied), step)
    assert verdict.outcome == "same", verdict


@pytest.mark.parametrize("compare", ["gradients", "update"])
def test_two_tensors_for_one_shared_parameter_are_an_error(compare: Any) -> None:
    def returns_two(model: nn.Module, shard: Any, rank: Rank) -> Mapping[str, Tensor | None]:
        backward(model, shard)
        found = both_names(model) if compare == "gradients" else dict(model.state_dict())
        return found | {"second.weight": torch.zeros(5, 5)}

    verdict = check(own_case(model=Tied), returns_two, compare=compare)
    assert verdict.outcome == "unknown"
    assert (
        "two different tensors for the parameter first.weight: as first.weight and as second.weight"
    ) in " ".join(str(verdict).split())
