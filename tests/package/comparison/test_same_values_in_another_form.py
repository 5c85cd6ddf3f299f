"""None and zeros, sparse and dense: the same values in another form are the same, and are noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from ddp_equivalence.comparison.comparison import Comparison, Form, OtherForm, compare
from ddp_equivalence.comparison.tolerance import Tolerance
from tests.package.own_cases import loss, own_case

ONES = torch.ones(3, dtype=torch.float64)
ZEROS = torch.zeros(3, dtype=torch.float64)
TABLE = torch.eye(4, dtype=torch.float64)[:, :2]
TINY = torch.full((3,), 1e-300, dtype=torch.float64)


def judge(expected: Tensor | None, *ranks: Tensor | None) -> Comparison:
    """Beside a parameter that is right on all ranks."""
    right = {"right": ONES}
    measured = {
        rank: {"one": one if one is None else one.clone(), "right": ONES.clone()}
        for rank, one in enumerate(ranks)
    }
    return compare(right | {"one": expected}, measured, Tolerance(torch.float64))


@pytest.mark.parametrize(
    ("expected", "ranks", "other_forms"),
    [
        (None, (None, None), ()),
        (None, (ZEROS, ZEROS), ((Form.ABSENT, Form.ZEROS, (0, 1)),)),
        (None, (-ZEROS, ZEROS), ((Form.ABSENT, Form.ZEROS, (0, 1)),)),
        (ZEROS, (None, None), ((Form.ZEROS, Form.ABSENT, (0, 1)),)),
        (ZEROS, (-ZEROS, ZEROS), ()),
        (torch.empty(0).double(), (None, torch.empty(0).double()), ()),
        (None, (ZEROS.to_sparse(), ZEROS), ((Form.ABSENT, Form.ZEROS, (0, 1)),)),
        (TABLE.to_sparse(), (TABLE, TABLE), ((Form.SPARSE, Form.DENSE, (0, 1)),)),
        (TABLE, (TABLE.to_sparse(), TABLE), ((Form.DENSE, Form.SPARSE, (0,)),)),
    ],
)
def test_the_same_values_in_another_form_are_the_same_and_are_noted(
    expected: Tensor | None, ranks: tuple[Tensor | None, ...], other_forms: Any
) -> None:
    found = judge(expected, *ranks)
    assert found.same, found
    assert found.other_forms == tuple(
        OtherForm("one", in_big_batch, on_ranks, of) for in_big_batch, on_ranks, of in other_forms
    )


@pytest.mark.parametrize(
    ("expected", "ranks"),
    [
        (None, (ONES, ONES)),
        (None, (None, ONES)),
        (None, (ZEROS, TINY)),
        (None, (torch.full((3,), float("nan")).double(), ZEROS)),
        (None, (ZEROS.float(), ONES.float().to_sparse())),
        (ONES, (None, None)),
        (ONES, (ONES, None)),
        (ONES, (ZEROS, ONES)),
        (ZEROS, (TINY, None)),
        (ZEROS, (None, ONES)),
        (TINY, (None, TINY)),
        (TABLE.to_sparse(), (2 * TABLE, 2 * TABLE)),
        (TABLE, (TABLE, 2 * TABLE.to_sparse())),
    ],
)
def test_other_values_are_different_in_any_form(
    expected: Tensor | None, ranks: tuple[Tensor | None, ...]
) -> None:
    assert not judge(expected, *ranks).same


def test_an_uncoalesced_sparse_gradient_counts_repeated_rows() -> None:
    places, values = torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 5.0])
    half = torch.sparse_coo_tensor(places, values, (3,), check_invariants=True)
    truth = torch.tensor([3.0, 5.0, 0.0]).double()
    for expected, measured in ((truth, half.double()), (half.double(), truth)):
        assert judge(expected, measured).same


def test_a_name_that_is_left_out_counts_as_none() -> None:
    truth: dict[str, Tensor | None] = {"one": ONES, "frozen": None, "unused": ZEROS}
    found = compare(truth, {0: {"one": ONES.clone()}}, Tolerance(torch.float64))
    assert found.same
    found = compare(truth, {0: {"unused": ZEROS.clone()}}, Tolerance(torch.float64))
    assert found.structure == ("rank 0: one is missing",)


class WithAnUnusedHead(nn.Module):
    """``unused`` has no gradient in the big batch; ``multiplied_by_zero`` has one of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)
        self.multiplied_by_zero = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.used(rows) + 0 * self.multiplied_by_zero  # type: ignore[no-any-return]


def fills_in_zeros(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def fills_in_zeros_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    fills_in_zeros(model, shard, rank)
    if rank.rank:
        model.get_parameter("unused.weight").grad = None


def drops_zeros(model: nn.Module, shard: Any, rank: Rank) -> None:
    fills_in_zeros(model, shard, rank)
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.any():
            parameter.grad = None


def finds_unused(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss(ddp, shard).backward()


def returns_what_is_trained(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Tensor]:
    finds_unused(model, shard, rank)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("step", "notes"),
    [
        (
            fills_in_zeros,
            "frozen, unused.weight, unused.bias have no gradient in the big batch and zeros on all "
            "ranks: an optimizer with weight decay or momentum would move them",
        ),
        (
            drops_zeros,
            "multiplied_by_zero has a gradient of zeros in the big batch and none on any rank: "
            "an optimizer with weight decay or momentum would not move it",
        ),
        (finds_unused, "WithAnUnusedHead"),
        (returns_what_is_trained, "WithAnUnusedHead"),
    ],
)
def test_zeros_and_none_are_the_same_and_the_report_says_what_an_optimizer_would_do(
    step: Any, notes: str
) -> None:
    for steps in (1, 2):
        verdict = check(own_case(model=WithAnUnusedHead), step, steps=steps)
        assert verdict.outcome == "same", verdict
        assert notes in " ".join(verdict.full_report().split())


@pytest.mark.parametrize(
    ("expected", "ranks", "sentence"),
    [
        (
            None,
            (None, ZEROS),
            "rank 1: one has a gradient of zeros, and on other ranks no gradient",
        ),
        (
            ZEROS,
            (None, ZEROS),
            "rank 0: one has no gradient, and on other ranks a gradient of zeros",
        ),
    ],
)
def test_zeros_on_some_ranks_and_none_on_others_are_a_difference(
    expected: Tensor | None, ranks: tuple[Tensor | None, ...], sentence: str
) -> None:
    found = judge(expected, *ranks)
    assert not found.same
    assert found.structure == (f"{sentence}: an optimizer may move them apart",)


def test_the_report_says_which_ranks_an_optimizer_would_move_apart() -> None:
    verdict = check(own_case(model=WithAnUnusedHead), fills_in_zeros_on_one_rank)
    assert verdict.outcome == "different"
    report = " ".join(verdict.full_report().split())
    assert "rank 0: unused.weight has a gradient of zeros" in report


def test_an_unused_parameter_with_a_gradient_is_different() -> None:
    def adds_a_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
        finds_unused(model, shard, rank)
        model.get_parameter("unused.weight").grad = torch.full((3, 5), 1e-300, dtype=torch.float64)

    verdict = check(own_case(model=WithAnUnusedHead), adds_a_gradient)
    assert verdict.outcome == "different"
    assert "unused.weight is (3, 5) float64, expected None" in verdict.full_report()


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(4, 5, sparse=True), nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        places = rows[:, 0].abs().long().clamp(max=3)
        return self.linear(rows + self.table(places))  # type: ignore[no-any-return]


def densifies(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense()
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def test_a_sparse_gradient_that_the_ranks_densify_is_the_same_and_the_report_says_so() -> None:
    verdict = check(own_case(model=WithTable), densifies)
    assert verdict.outcome == "same", verdict
    assert "table.weight is sparse in the big batch and dense on all ranks" in " ".join(
        verdict.full_report().split()
    )


def test_a_densified_gradient_that_is_wrong_is_different_and_named() -> None:
    def sums(model: nn.Module, shard: Any, rank: Rank) -> None:
        densifies(model, shard, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= rank.world_size

    verdict = check(own_case(model=WithTable), sums)
    assert (verdict.outcome, verdict.cause) == ("different", "sum_not_mean"), verdict
