"""Plausible models, losses and steps of somebody's own: judged right, or refused by name."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from tests.package.own_cases import build_model, loss, make_batch, own_case, right_step


class TwoHeads(nn.Module):
    """``noisy`` feeds the loss through randomness that differs from pass to pass."""

    def __init__(self) -> None:
        super().__init__()
        self.steady, self.noisy = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        noise = torch.randn(len(rows), 3, dtype=rows.dtype)
        out: Tensor = self.steady(rows) + self.noisy(rows) * noise
        return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_parameter_without_a_usable_limit_makes_the_check_unknown(dtype: torch.dtype) -> None:
    """Else a fault in it would pass unseen behind the others."""

    def noisy_head_zeroed(model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)
        model.get_submodule("noisy").zero_grad()

    assert check(own_case(model=TwoHeads, dtype=dtype), noisy_head_zeroed).outcome != "same"


class BeforeNorm(nn.Module):
    """The scale in front of LayerNorm has, but for rounding, no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: Tensor) -> Tensor:
        return F.layer_norm(self.linear(rows) * self.scale, (3,), eps=0.0)


SEEDS = range(6)
WELL_ROUNDED = (3, 4, 5)
"""With these seeds every limit in bfloat16 is less than half of one that would be useless."""


@pytest.mark.parametrize(
    ("dtype", "known"),
    [(torch.float64, SEEDS), (torch.float32, SEEDS), (torch.bfloat16, WELL_ROUNDED)],
)
def test_a_gradient_that_is_zero_but_for_rounding_is_no_false_alarm(
    dtype: torch.dtype, known: Iterable[int]
) -> None:
    """In bfloat16 the rounding of another parameter, linear.bias, is sometimes too large to judge
    it, and whether it is may depend on the processor.
    """
    cases = [own_case(model=BeforeNorm, dtype=dtype, seed=seed) for seed in SEEDS]
    outcomes = [check(case, right_step).outcome for case in cases]
    assert "different" not in outcomes
    assert {outcomes[seed] for seed in known} == {"same"}


def pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(24, 3, 5, generator=generator),
        "order": torch.randn(24, generator=generator).sign(),
    }


def ranking(model: nn.Module, batch: Any) -> Tensor:
    """Only differences of scores count, so the bias of the last layer has no gradient at all."""
    scores = model(batch["rows"])[..., 0]
    return F.margin_ranking_loss(scores[:, 0], scores[:, 1], batch["order"], margin=0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranks_may_hold_rounding_where_one_device_holds_exactly_zero(dtype: torch.dtype) -> None:
    def score() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        ranking(ddp, shard).backward()

    cases = [
        Case(model=score, batch=pairs, loss=ranking, layout="2x2", dtype=dtype, seed=seed)
        for seed in (0, 1, 2, 10, 37)  # in 10 and 37 its terms cancel exactly in every run
    ]
    assert [check(case, step).outcome for case in cases] == ["same"] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_such_a_gradient_does_not_hide_the_cause(dtype: torch.dtype) -> None:
    def doubled(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        (rank.world_size * loss(ddp, shard)).backward()

    assert check(own_case(model=BeforeNorm, dtype=dtype), doubled).cause == "sum_not_mean"


def test_one_coarse_parameter_does_not_widen_the_limit_of_the_others() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.coarse = nn.Parameter(torch.ones(2).bfloat16(), requires_grad=False)

        def forward(self, rows: Tensor) -> Tensor:
            return self.linear(rows)  # type: ignore[no-any-return]

    def a_little_more(model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1.03

    case = own_case(model=Mixed, dtype=None)
    assert check(case, right_step).outcome == "same"
    assert check(case, a_little_more).outcome == "different"


def labels_as_floats(generator: torch.Generator) -> Any:
    labels = torch.randint(3, (12,), generator=generator)
    return {"rows": torch.randn(12, 5, generator=generator), "labels": labels.float()}


def loss_of_labels(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["rows"]), batch["labels"].long())


def loss_that_changes_its_batch(model: nn.Module, batch: Any) -> Tensor:
    batch["rows"].mul_(2)
    return loss(model, batch)


def in_float32(model: nn.Module, batch: Any) -> Tensor:
    """As Hugging Face's losses do, whatever the model's dtype."""
    return F.mse_loss(model(batch["rows"]).float(), batch["targets"].float())


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": labels_as_floats, "loss": loss_of_labels},
        {"loss": loss_that_changes_its_batch},
        {"loss": in_float32, "layout": "1x3"},
        {"dtype": torch.float16},
        {"dtype": None},
        {"layout": "1+3", "shards": "3+3+3+3"},
    ],
    ids=["labels as floats", "in place", "float32 inside", "float16", "as built", "1+3"],
)
def test_a_right_step_is_the_same_on_plausible_cases(changes: dict[str, Any]) -> None:
    case = own_case(**changes)

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        case.loss(ddp, shard).backward()  # type: ignore[operator]

    verdict = check(case, step)
    assert verdict.outcome == "same", verdict


def test_what_the_caller_has_set_is_what_the_ranks_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN_SIZE", "4")

    def build() -> nn.Module:
        return nn.Linear(5, int(os.environ.get("HIDDEN_SIZE", "3")))

    def mean_square(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["rows"]).square().mean()  # type: ignore[no-any-return]

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        mean_square(ddp, shard).backward()

    torch.set_default_dtype(torch.float64)
    try:
        assert check(own_case(model=build, loss=mean_square), step).outcome == "same"
    finally:
        torch.set_default_dtype(torch.float32)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).tanh())[:, :3]  # type: ignore[no-any-return]


def train(model: nn.Module, shard: Any, rank: Rank) -> Any:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for part in range(2):
        optimizer.zero_grad()
        half = {name: leaf.chunk(2)[part] for name, leaf in shard.items()}
        loss(ddp, half).backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def test_a_trainer_may_return_its_state_dict() -> None:
    case = own_case(model=Tied)
    verdict = check(case, train, compare="update", lr=0.05, steps=2)
    assert verdict.outcome == "same", verdict
    assert check(case, train, compare="update", lr=0.1, steps=2).outcome == "different"


def test_a_step_that_moves_the_weights_between_steps_is_told_so() -> None:
    def steps_itself(model: nn.Module, shard: Any, rank: Rank) -> None:
        right_step(model, shard, rank)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    verdict = check(own_case(), steps_itself, steps=2)
    assert verdict.outcome == "unknown"
    assert "the step moved the weights itself" in str(verdict)
    assert check(own_case(), steps_itself).outcome == "same"


def test_a_step_that_destroys_its_group_does_not_spoil_the_next_check() -> None:
    def destroys(model: nn.Module, shard: Any, rank: Rank) -> None:
        loss(model, shard).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        dist.destroy_process_group()

    assert check(own_case(), destroys).outcome == "same"
    assert check(own_case(), right_step).outcome == "same"


def test_no_fault_is_excused_because_the_model_has_dropout() -> None:
    def left_out(model: nn.Module, shard: Any, rank: Rank) -> None:
        F.mse_loss(model(shard["inputs"]), shard["targets"]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= rank.rank != 1
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    verdict = check(Case(model="dropout", loss="mse_mean", layout="1x4"), left_out)
    assert (verdict.outcome, verdict.cause) == ("different", "rank_left_out")


def called_by_keyword(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(input=batch["rows"]), batch["targets"])


def test_emulated_replicas_may_be_called_by_keyword() -> None:
    case = own_case(model=lambda: nn.Linear(5, 3), loss=called_by_keyword, layout="1x4")
    assert check(case, "emulated_data_parallel").outcome == "same"


def test_bucket_views_of_one_step_are_not_overwritten_by_the_next() -> None:
    wrapped: dict[nn.Module, DistributedDataParallel] = {}

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        if model not in wrapped:
            wrapped[model] = DistributedDataParallel(model, gradient_as_bucket_view=True)
        loss(wrapped[model], shard).backward()

    assert check(own_case(), step, steps=3).outcome == "same"


ONE = build_model()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3, dtype=torch.complex64))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.to(torch.complex64) @ self.weight).real


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise NotImplementedError("no derivative")


def loss_without_way_back(model: nn.Module, batch: Any) -> Tensor:
    return NoWayBack.apply(loss(model, batch))  # type: ignore[no-any-return,no-untyped-call]


def test_a_builder_that_hands_out_one_instance_is_refused_before_it_can_matter() -> None:
    """Its first use is as good as any; its second begins where the first one ended."""
    case = own_case(model=lambda: ONE)
    assert check(case, right_step).outcome == "same"
    with pytest.raises(BadCase, match="a new model at each call"):
        check(case, right_step)


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model": Complex, "dtype": None}, "model", "weight is torch.complex64"),
        ({"model": lambda: nn.LazyLinear(3)}, "model", "weight is lazy"),
        ({"loss": loss_without_way_back}, "loss", "go backward; it raised NotImplementedError"),
        ({"shards": "no_valid_token"}, "shards", "only batches of the catalogue are padded so"),
        ({"seed": 2**64}, "seed", "below 2\\*\\*62"),
    ],
    ids=["complex", "lazy", "no backward", "no valid token", "seed"],
)
def test_what_cannot_be_judged_is_refused_by_name(
    changes: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(BadCase, match=says) as caught:
        check(own_case(**changes), right_step)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options", [{"steps": 2}, {"compare": "update"}], ids=["two steps", "update"]
)
def test_exact_is_one_step_of_gradients(options: dict[str, Any]) -> None:
    with pytest.raises(BadCase, match="leave the integers"):
        check(Case(model="mlp", loss="mse_sum", exact=True), "ddp_sum", **options)


def test_a_frozen_integer_parameter_is_carried_along() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(3), requires_grad=False)
            self.linear = nn.Linear(5, 3)

        def forward(self, rows: Tensor) -> Tensor:
            return self.linear(rows) + self.table  # type: ignore[no-any-return]

    assert check(own_case(model=Quantised), right_step).outcome == "same"


def test_nothing_of_the_batch_is_shared_between_checks() -> None:
    made = {name: leaf.double() for name, leaf in make_batch(torch.Generator()).items()}
    before = {name: leaf.clone() for name, leaf in made.items()}
    case = own_case(batch=lambda generator: made, loss=loss_that_changes_its_batch)

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        loss_that_changes_its_batch(ddp, shard).backward()

    assert [check(case, step).outcome for _ in range(2)] == ["same", "same"]
    assert all(torch.equal(made[name], before[name]) for name in before)


def test_parameters_of_one_element_that_are_reduced_one_by_one_are_compared() -> None:
    """A collective on one element is then an exchange of gradients."""

    def by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
        scalar_loss(model, shard).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    def scalar_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["rows"][:, :1]), batch["targets"][:, :1])

    case = own_case(model=lambda: nn.Linear(1, 1), loss=scalar_loss)
    assert check(case, by_hand).outcome == "same"
