"""What is recorded of the model's calls leaves no trace on it, and makes no step fail."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.measurement import observation
from ddp_equivalence.measurement.observer import CalledWith
from tests.package.own_cases import build_model, loss, own_case

Batch = dict[str, Tensor]
Step = Callable[[nn.Module, Batch, Rank], Any]


def right(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def averaged(gradients: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= rank.world_size
    return gradients


def value(parameters: Any, model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(functional_call(model, parameters, (rows,)), targets)


def gradient_by_torch_func(model: nn.Module, shard: Batch, rank: Rank) -> Any:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = grad(value)(parameters, model, shard["rows"], shard["targets"])
    return averaged(gradients, rank)


def gradients_of_single_examples(model: nn.Module, shard: Batch, rank: Rank) -> Any:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    per_example = vmap(lambda row, target: grad(value)(parameters, model, row, target))
    gradients = per_example(shard["rows"], shard["targets"])
    return averaged({name: one.mean(0) for name, one in gradients.items()}, rank)


def vmapped_model_beside(model: nn.Module, shard: Batch, rank: Rank) -> None:
    vmap(model, in_dims=1)(torch.stack([shard["rows"]] * 2, 1))
    right(model, shard, rank)


def saves_the_model(model: nn.Module, shard: Batch, rank: Rank) -> None:
    torch.save(model, io.BytesIO())
    pickle.dumps(model)
    right(model, shard, rank)
    torch.save(model, io.BytesIO())


def copies_the_model(model: nn.Module, shard: Batch, rank: Rank) -> None:
    average = copy.deepcopy(model)
    average(shard["rows"][:1])
    right(model, shard, rank)


def scripts_the_model(model: nn.Module, shard: Batch, rank: Rank) -> None:
    torch.jit.script(model)(shard["rows"])
    right(model, shard, rank)


def exports_the_model(model: nn.Module, shard: Batch, rank: Rank) -> None:
    torch.export.export(model, (shard["rows"],), strict=False)
    right(model, shard, rank)


def compiles_the_whole_model(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    loss(compiled, shard)
    loss(ddp, shard).backward()


def compiles_the_wrapper(model: nn.Module, shard: Batch, rank: Rank) -> None:
    compiled: Any = torch.compile(DistributedDataParallel(model), backend="eager")
    loss(compiled, shard).backward()


def has_a_model_on_meta(model: nn.Module, shard: Batch, rank: Rank) -> None:
    copy.deepcopy(model).to("meta")(shard["rows"].to("meta"))
    with torch.device("meta"):
        right(model, shard, rank)


def under_fake_tensors(model: nn.Module, shard: Batch, rank: Rank) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.randn(2, 5).double())
    right(model, shard, rank)


STEPS: list[Step] = [
    gradient_by_torch_func,
    gradients_of_single_examples,
    vmapped_model_beside,
    saves_the_model,
    copies_the_model,
    scripts_the_model,
    exports_the_model,
    compiles_the_whole_model,
    compiles_the_wrapper,
    has_a_model_on_meta,
    under_fake_tensors,
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_that_transforms_traces_or_copies_its_model_is_watched(
    step: Step,
) -> None:
    def summed(model: nn.Module, shard: Batch, rank: Rank) -> Any:
        gradients = step(model, shard, rank)
        if gradients is None:
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {name: rank.world_size * gradient for name, gradient in gradients.items()}

    verdict = check(own_case(), summed)
    assert verdict.cause == "sum_not_mean", verdict
    assert sorted(verdict.observed) == [0, 1], verdict.why_not_watched


class Slotted(nn.Module):
    __slots__ = ("width",)

    def __init__(self) -> None:
        super().__init__()
        self.width = 3
        self.inner = build_model()

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = copy.copy(self).inner(rows)
        return out


class Incomparable(Slotted):
    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("modules are not compared")


class Selective(nn.Module):
    """Takes rows as a sparse or nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()

    def forward(self, rows: Tensor) -> Tensor:
        dense = rows.to_padded_tensor(0.0) if rows.is_nested else rows.to_dense()
        out: Tensor = self.inner(dense)
        return out


def sparse_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["rows"].to_sparse()), batch["targets"])


def nested_loss(model: nn.Module, batch: Batch) -> Tensor:
    nested = torch.nested.nested_tensor(list(batch["rows"]), layout=torch.jagged)
    return F.mse_loss(model(nested), batch["targets"])


@pytest.mark.parametrize(
    "changes",
    [
        {"model": Slotted},
        {"model": Incomparable},
        {"model": Selective, "loss": sparse_loss},
        {"model": Selective, "loss": nested_loss},
    ],
)
def test_models_and_arguments_out_of_the_ordinary_are_judged_and_watched(
    changes: dict[str, Any],
) -> None:
    case: Case = own_case(**changes)
    of_case: Any = case.loss

    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        (2 * of_case(ddp, shard)).backward()

    verdict = check(case, step)
    assert verdict.outcome == "different", verdict
    assert sorted(verdict.observed) == [0, 1], verdict.why_not_watched


def test_a_model_that_nobody_hears_any_more_is_called_as_ever() -> None:
    model = build_model().double()
    recorded = CalledWith([])
    with recorded.recording(model):
        assert nn.Module.__call__ is not observation._call
        model(torch.randn(2, 5).double())
    assert nn.Module.__call__ is observation._call
    assert recorded.arguments is not None


def test_a_module_that_is_freed_is_forgotten() -> None:
    module = nn.Linear(2, 2)
    freed = weakref.ref(module)
    observation.listen(module, lambda arguments: None)
    del module
    assert freed() is None
    assert nn.Module.__call__ is observation._call


def test_a_listener_that_raises_does_not_reach_the_caller() -> None:
    called = []

    def fails(arguments: Any) -> Any:
        called.append(arguments)
        raise ValueError("a listener")

    model = build_model()
    with observation.heard(model, fails):
        assert model(torch.randn(2, 5)).shape == (2, 3)
    assert len(called) == 1


def test_an_error_in_the_model_is_blamed_on_the_users_line() -> None:
    def wrong_shape(model: nn.Module, shard: Batch, rank: Rank) -> None:
        model(torch.randn(2, 9).double())

    verdict = check(own_case(), wrong_shape)
    assert verdict.failure is not None
    assert "model(torch.randn(2, 9).double())" in verdict.failure.ends[0].line
