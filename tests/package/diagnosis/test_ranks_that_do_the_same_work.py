"""Ranks that do the same work show nothing. Equal calls of the model alone do not show that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case.random_state import generator_seed
from tests.package.own_cases import build_model, loss, make_batch, own_case

GRID = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]


def curve() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))


def physics_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model is called on a fixed grid; the examples are measured values on that grid."""
    return F.mse_loss(model(GRID).T.expand_as(batch["values"]), batch["values"])


def equation_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same, with derivatives of the model in the loss."""
    grid = GRID.clone().requires_grad_()
    value = model(grid)
    (slope,) = torch.autograd.grad(value.sum(), grid, create_graph=True)
    return physics_loss(model, batch) + F.mse_loss(slope, value)


def values_on_the_grid(generator: torch.Generator) -> dict[str, Tensor]:
    return {"values": torch.randn(12, 7, generator=generator)}


class Table(nn.Module):
    """A model that takes no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(7))

    def forward(self) -> Tensor:
        return self.values * 2


def table_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model().expand_as(batch["values"]), batch["values"])


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight


def loss_without_forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    weight = model.get_parameter("weight")
    return F.mse_loss(batch["rows"] @ weight, batch["targets"][:, :1])


def loss_with_a_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model itself is called with nothing but a constant, and gets the same gradient back."""
    of_a_constant: Tensor = model(torch.ones(2, 5).double())
    return loss_without_forward(model, batch) + of_a_constant.square().mean()


@dataclass
class Packed:
    rows: Tensor


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()

    def forward(self, packed: Packed) -> Any:
        return self.inner(packed.rows)


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(Packed(batch["rows"])), batch["targets"])


def functional_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    return F.mse_loss(functional_call(model, parameters, (batch["rows"],)), batch["targets"])


def averaged(case: Case) -> Any:
    """The right step of this case, with the gradients averaged by hand."""
    of_case: Any = case.loss

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        of_case(model, shard).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(rank.world_size)

    return step


def on_own_half(step: Any) -> Any:
    def with_own_half(model: nn.Module, batch: Any, rank: Rank) -> None:
        step(model, {name: leaf[rank.rank :: 2] for name, leaf in batch.items()}, rank)

    return with_own_half


GRID_CASES: dict[str, dict[str, Any]] = {
    "a grid": {"model": curve, "loss": physics_loss},
    "a grid and derivatives": {"model": curve, "loss": equation_loss},
    "no argument": {"model": Table, "loss": table_loss},
}
ROW_CASES: dict[str, dict[str, Any]] = {
    "a dataclass": {"model": Unpacking, "loss": packed_loss},
    "functional_call": {"model": build_model, "loss": functional_loss},
    "nothing, since it is not called": {"model": Weight, "loss": loss_without_forward},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {**one, "batch": values_on_the_grid} for name, one in GRID_CASES.items()},
    **{name: {**one, "batch": make_batch} for name, one in ROW_CASES.items()},
}


@pytest.mark.parametrize("called_with", CASES)
def test_ranks_with_examples_of_their_own_are_compared_whatever_the_model_gets(
    called_with: str,
) -> None:
    case = own_case(**CASES[called_with])
    assert check(case, averaged(case)).outcome == "same"


@pytest.mark.parametrize("called_with", CASES)
def test_ranks_that_take_examples_of_their_own_are_compared(called_with: str) -> None:
    case = own_case(**CASES[called_with], shards="own")
    assert check(case, on_own_half(averaged(case))).outcome == "same"


@pytest.mark.parametrize("called_with", [name for name in CASES if "not called" not in name])
def test_ranks_that_all_take_the_whole_batch_show_nothing(called_with: str) -> None:
    case = own_case(**CASES[called_with], shards="own")
    verdict = check(case, averaged(case))
    assert verdict.outcome == "unknown"
    assert "identical inputs on all ranks" in verdict.reason


def test_whole_batches_are_not_noticed_if_the_model_is_never_called() -> None:
    """A known limit, which README states: nobody can hear what such a step reads."""
    case = own_case(**CASES["nothing, since it is not called"], shards="own")
    assert check(case, averaged(case)).outcome == "same"


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("calls", [1, 3])
def test_ranks_that_all_take_the_whole_batch_in_other_orders_show_nothing(
    calls: int, scale: float
) -> None:
    """Also if the rows are not those of the batch any more, as after normalising them."""

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, {**batch, "rows": scale * batch["rows"]})

    def step(model: nn.Module, batch: Any, rank: Rank) -> None:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(rank.rank))
        for part in order.chunk(calls):
            (scaled(model, {name: leaf[part] for name, leaf in batch.items()}) / calls).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad.div_(rank.world_size)

    verdict = check(own_case(loss=scaled, shards="own"), step)
    assert verdict.outcome == "unknown"
    assert "identical inputs on all ranks" in verdict.reason


def absolute_errors(model: nn.Module, batch: Any) -> Tensor:
    """Only the signs of the gradients depend on the examples, which both ranks may have alike."""
    return F.l1_loss(model(SIX_PLACES), batch["values"])


def test_ranks_whose_gradients_have_equal_sums_are_compared() -> None:
    def step(model: nn.Module, batch: Any, rank: Rank) -> None:
        half = {"values": batch["values"][6 * rank : 6 * rank + 6]}
        absolute_errors(model, half).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad.div_(rank.world_size)

    def loss_of_all(model: nn.Module, batch: Any) -> Tensor:
        halves = [{"values": batch["values"][:6]}, {"values": batch["values"][6:]}]
        return (absolute_errors(model, halves[0]) + absolute_errors(model, halves[1])) / 2

    def values(generator: torch.Generator) -> dict[str, Tensor]:
        """Four high and two low ones in each half, at other places."""
        signs = [1, 1, 1, 1, -1, -1, -1, 1, 1, -1, 1, 1]
        return {"values": 9 * torch.tensor(signs).float().unsqueeze(1)}

    case = own_case(model=lambda: nn.Linear(1, 1), batch=values, loss=loss_of_all, shards="own")
    assert check(case, step).outcome == "same"


SIX_PLACES = torch.linspace(0, 1, 6, dtype=torch.float64).unsqueeze(1)


def other_ranks_masked(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank reads all examples, and its loss counts its own."""
    own = torch.arange(12) % 2 == rank.rank
    errors = ((model(batch["rows"]) - batch["targets"]) ** 2).mean(1)
    (errors * own).sum().div(6).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad.div_(rank.world_size)


def test_ranks_that_read_all_examples_and_count_their_own_are_compared() -> None:
    assert check(own_case(shards="own"), other_ranks_masked).outcome == "same"


@pytest.mark.parametrize("called_with", CASES)
def test_ranks_that_all_train_on_the_shard_of_rank_0_differ(called_with: str) -> None:
    case = own_case(**CASES[called_with])
    step = averaged(case)

    def on_the_shard_of_rank_0(model: nn.Module, shard: Any, rank: Rank) -> None:
        for leaf in shard.values():
            dist.broadcast(leaf, 0)
        step(model, shard, rank)

    assert check(case, on_the_shard_of_rank_0).outcome == "different"


def test_a_penalty_on_a_constant_is_no_sign_of_the_same_work() -> None:
    case = own_case(model=Weight, loss=loss_with_a_penalty)
    assert check(case, averaged(case)).outcome == "same"


def test_a_step_that_ignores_its_shard_and_takes_the_whole_batch_shows_nothing() -> None:
    def with_a_data_set_of_its_own(model: nn.Module, shard: Any, rank: Rank) -> None:
        generator = torch.Generator().manual_seed(generator_seed(0))
        batch = {name: leaf.double() for name, leaf in make_batch(generator).items()}
        ddp = DistributedDataParallel(model)
        loss(ddp, batch).backward()

    verdict = check(own_case(), with_a_data_set_of_its_own)
    assert verdict.outcome == "unknown"
    assert "identical inputs on all ranks" in verdict.reason


def test_rows_that_no_value_shows_are_still_the_same_work() -> None:
    """Each row is normalised by itself, so that none can be recognised."""

    def normalised_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(F.layer_norm(batch["rows"], (5,))), batch["targets"])

    case = own_case(loss=normalised_loss, shards="own")
    assert check(case, averaged(case)).outcome == "unknown"
    assert check(case, on_own_half(averaged(case))).outcome == "same"


def test_a_call_without_gradients_is_no_work() -> None:
    def looks_at_a_constant(model: nn.Module, batch: Any, rank: Rank) -> None:
        with torch.no_grad():
            model(torch.ones(2, 5).double())
        averaged(own_case(loss=loss_without_forward))(model, batch, rank)

    case = own_case(model=Weight, loss=loss_without_forward, shards="own")
    assert check(case, on_own_half(looks_at_a_constant)).outcome == "same"
