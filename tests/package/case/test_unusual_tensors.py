"""Tensors of unusual kinds in a batch are judged right, or refused by name; no report raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from tests.package.own_cases import EXAMPLES, loss, make_batch, own_case, right_step


def sparse(generator: torch.Generator) -> Any:
    batch = make_batch(generator)
    return batch | {"rows": (batch["rows"] * (batch["rows"] > 0)).to_sparse()}


def loss_of_sparse(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch | {"rows": batch["rows"].to_dense()})


def flags_and_bytes(generator: torch.Generator) -> Any:
    small = torch.randint(-3, 4, (EXAMPLES, 5), generator=generator)
    return make_batch(generator) | {"flags": small > 0, "bytes": small.to(torch.int8)}


def loss_of_flags(model: nn.Module, batch: Any) -> Tensor:
    rows = batch["rows"] * batch["flags"] + batch["bytes"]
    return loss(model, batch | {"rows": rows})


def complex_rows(generator: torch.Generator) -> Any:
    batch = make_batch(generator)
    return batch | {"rows": torch.complex(batch["rows"], batch["rows"].flip(0))}


def loss_of_complex(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch | {"rows": batch["rows"].real + batch["rows"].imag})


def rows_with_a_gradient(generator: torch.Generator) -> Any:
    """The rows are computed, so that a graph leads to them, which backward would free."""
    batch = make_batch(generator)
    scale = torch.tensor(2.0, requires_grad=True)
    return batch | {"rows": batch["rows"] * scale}


def loss_with_a_gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch["rows"])
    (slope,) = torch.autograd.grad(outputs.sum(), batch["rows"], create_graph=True)
    penalty: Tensor = slope.square().sum(1).mean()
    return F.mse_loss(outputs, batch["targets"]) + penalty


def expanded(generator: torch.Generator) -> Any:
    batch = make_batch(generator)
    return batch | {"rows": batch["rows"][:, :1].expand(-1, 5), "one": torch.ones(1).expand(12)}


def loss_that_writes(model: nn.Module, batch: Any) -> Tensor:
    batch["rows"].mul_(2)
    batch["one"][0] = 3.0
    return loss(model, batch)


def transposed(generator: torch.Generator) -> Any:
    return {name: leaf.T.contiguous().T for name, leaf in make_batch(generator).items()}


def twice(generator: torch.Generator) -> Any:
    batch = make_batch(generator)
    return batch | {"again": batch["rows"], "view": batch["rows"][:, :2]}


def loss_of_twice(model: nn.Module, batch: Any) -> Tensor:
    batch["rows"].add_(1)
    of_the_other: Tensor = model(batch["again"]).square().mean()
    return loss(model, batch) + of_the_other


def with_nothing(generator: torch.Generator) -> Any:
    return make_batch(generator) | {"nothing": torch.ones(EXAMPLES, 0)}


def loss_of_nothing(model: nn.Module, batch: Any) -> Tensor:
    rows = torch.cat([batch["rows"], batch["nothing"]], dim=1)
    return loss(model, batch | {"rows": rows})


def only_a_tensor(generator: torch.Generator) -> Any:
    return torch.randn(EXAMPLES, 5, generator=generator)


def loss_of_a_tensor(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


UNUSUAL: dict[str, tuple[Any, Any]] = {
    "sparse": (sparse, loss_of_sparse),
    "flags and bytes": (flags_and_bytes, loss_of_flags),
    "complex": (complex_rows, loss_of_complex),
    "requires a gradient": (rows_with_a_gradient, loss_with_a_gradient_penalty),
    "expanded": (expanded, loss_that_writes),
    "transposed": (transposed, loss),
    "twice": (twice, loss_of_twice),
    "nothing": (with_nothing, loss_of_nothing),
    "a tensor": (only_a_tensor, loss_of_a_tensor),
}


def step_of(case: Case, factor: float) -> Callable[[nn.Module, Any, Rank], None]:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        shard = own_rows(shard, rank) if case.shards == "own" else shard
        (factor * case.loss(ddp, shard)).backward()  # type: ignore[operator]

    return step


def own_rows(batch: Any, rank: Rank) -> Any:
    """The rank's half of the whole batch, as a sampler would take it."""
    own = slice(rank.rank * 6, rank.rank * 6 + 6)
    if isinstance(batch, Tensor):
        return batch[own]
    return {
        name: leaf.to_dense()[own].detach().requires_grad_(leaf.requires_grad)
        for name, leaf in batch.items()
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_right_step_is_the_same_and_a_wrong_one_differs(name: str, dtype: torch.dtype) -> None:
    batch, loss_of_it = UNUSUAL[name]
    if name == "complex" and dtype is torch.bfloat16:
        loss_of_it = loss_of_complex_in_the_models_dtype
    case = own_case(batch=batch, loss=loss_of_it, dtype=dtype)
    right = check(case, step_of(case, 1.0), steps=2)
    assert right.outcome == "same", right
    assert str(right)
    wrong = check(case, step_of(case, 2.0))
    assert wrong.outcome == "different", wrong
    assert "rank holds 2" in " ".join(wrong.full_report().split())


def loss_of_complex_in_the_models_dtype(model: nn.Module, batch: Any) -> Tensor:
    """There are no complex numbers of two bfloat16: complex tensors stay as they are."""
    rows = batch["rows"].to(torch.complex128)
    return loss(model, batch | {"rows": (rows.real + rows.imag).to(batch["targets"].dtype)})


@pytest.mark.parametrize("name", [one for one in UNUSUAL if one != "sparse"])
def test_a_step_may_take_its_own_examples_of_them(name: str) -> None:
    batch, loss_of_it = UNUSUAL[name]
    case = own_case(batch=batch, loss=loss_of_it, shards="own", dtype=None)
    verdict = check(case, step_of(case, 1.0))
    assert verdict.outcome == "same", verdict


class Itself:
    """It holds tensors, and itself."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.again = rows, self


class CalledWithAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, rows: Any) -> Tensor:
        if isinstance(rows, Itself):
            return self.linear(rows.rows)  # type: ignore[no-any-return]
        return self.linear(torch.stack(rows.unbind()))  # type: ignore[no-any-return]


def called_with_itself(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(Itself(batch["rows"])), batch["targets"])


def called_with_nested(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(torch.nested.as_nested_tensor(list(batch["rows"]))), batch["targets"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_of_it", [called_with_itself, called_with_nested])
def test_a_model_may_be_called_with_what_cannot_be_read(loss_of_it: Any) -> None:
    case = own_case(model=CalledWithAnything, loss=loss_of_it)

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        """DDP itself sees into what it is called with, so the gradients are reduced by hand."""
        loss_of_it(model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    assert check(case, step).outcome == "same"
    assert check(case, step_without_reduction(loss_of_it)).outcome == "different"


def step_without_reduction(loss_of_it: Any) -> Any:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        loss_of_it(model, shard).backward()

    return step


def test_a_sparse_tensor_has_no_place_in_an_exact_case() -> None:
    case = own_case(batch=sparse, loss=loss_of_sparse, exact=True, dtype=torch.float32)
    with pytest.raises(BadCase, match="a dense real tensor, since an exact case") as caught:
        check(case, right_step)
    assert str(caught.value).startswith("batch['rows'] is of type Tensor")
