"""Simulated ranks leave what real ranks leave, and what they leave at 1,024 is said in words."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.case.layouts import MAX_PROCESSES
from ddp_equivalence.checking import simulated
from ddp_equivalence.checking.simulated import Simulation, simulate, why_not_simulated
from ddp_equivalence.commands.simulate import report_lines
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import trials

pytestmark = pytest.mark.self_check

SIMULATED = [name for name, one in STRATEGIES.items() if not why_not_simulated(one)]

TRIED = {
    (name, one.case.ranks.world_size): None
    for name in SIMULATED
    for one in trials(name)
    if one.case.ranks.world_size in (2, 4, 8)
}
"""Strategies, and the numbers of ranks with which the catalogue tries them."""

Batch = dict[str, Tensor]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))


def rows(generator: torch.Generator) -> Batch:
    return {"x": torch.randn(64, 8, generator=generator)}


def loss(model: Any, batch: Batch) -> Tensor:
    value: Tensor = model(batch["x"]).square().mean()
    return value


def own_case(**fields: Any) -> Case:
    given: dict[str, Any] = {"model": build, "batch": rows, "loss": loss, "layout": "4x4"}
    return Case(**given | fields)


def ddp(model: nn.Module, shard: Batch, rank: Rank) -> None:
    wrapped = DistributedDataParallel(model)
    loss(wrapped, shard).backward()


def fsdp1(model: nn.Module, shard: Batch, rank: Rank) -> None:
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    loss(wrapped, shard).backward()


def divided_by_the_node(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for one in model.parameters():
        assert one.grad is not None
        dist.all_reduce(one.grad)
        one.grad /= int(os.environ["LOCAL_WORLD_SIZE"])


def reduced_in_nodes(model: nn.Module, shard: Batch, rank: Rank) -> None:
    size = rank.local_world_size
    groups = [dist.new_group(list(range(n * size, n * size + size))) for n in range(rank.nodes)]
    loss(model, shard).backward()
    for one in model.parameters():
        assert one.grad is not None
        dist.all_reduce(one.grad, op=dist.ReduceOp.SUM, group=groups[rank.node])
        one.grad /= size


def wrapper_dropped(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(DistributedDataParallel(model), shard).backward()


def sampled_by_local_rank(model: nn.Module, batch: Batch, rank: Rank) -> None:
    indices: Any = range(64)
    sampler: Any = DistributedSampler(
        indices, num_replicas=rank.local_world_size, rank=rank.local_rank, shuffle=False
    )
    wrapped = DistributedDataParallel(model)
    loss(wrapped, {"x": batch["x"][list(sampler)]}).backward()


def first_half_only(model: nn.Module, batch: Batch, rank: Rank) -> None:
    wrapped = DistributedDataParallel(model)
    loss(wrapped, {"x": batch["x"][rank.rank : 32 : rank.world_size]}).backward()


def clipped(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp(model, shard, rank)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def trains(model: nn.Module, shard: Batch, rank: Rank) -> None:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    loss(wrapped, shard).backward()
    optimizer.step()


def unused_on_rank_3(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    if rank.rank != 3:
        dist.all_reduce(torch.ones(1))


def writes_to_its_batch(model: nn.Module, batch: Batch, rank: Rank) -> None:
    batch["x"].mul_(2.0)
    part = slice(rank.rank, None, rank.world_size)
    wrapped = DistributedDataParallel(model)
    loss(wrapped, {"x": batch["x"][part] / 2}).backward()


def one_rank_lacks_a_gradient(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp(model, shard, rank)
    if rank.rank == 1:
        model[0].bias.grad = None  # type: ignore[index]


def four_times(model: nn.Module, shard: Batch, rank: Rank) -> None:
    wrapped = DistributedDataParallel(model)
    (4 * loss(wrapped, shard)).backward()


def with_equal_rows(generator: torch.Generator) -> Batch:
    rows = torch.randn(64, 8, generator=generator)
    rows[31] = rows[1]
    return {"x": rows}


def text_of(simulation: Simulation) -> str:
    return " ".join(" ".join(report_lines(simulation)).split())


def assert_alike(case: Case, step: Any, **options: Any) -> None:
    """The same outcome as on real ranks, and the same error of each parameter on each rank."""
    real, found = check(case, step, **options), simulate(case, step, **options)
    assert found.outcome == real.outcome, found.failure
    assert real.comparison is not None
    assert real.comparison.parameters
    assert found.comparison is not None
    for one, other in zip(real.comparison.parameters, found.comparison.parameters, strict=True):
        assert one.name == other.name
        for here, there in zip(one.by_rank, other.by_rank, strict=True):
            near = 1e-9 if case.dtype is torch.float64 else 1e-4
            right = pytest.approx((here.error, here.factor), rel=near, abs=1e-13, nan_ok=True)
            assert (there.error, there.factor) == right


@pytest.mark.parametrize(("strategy", "world_size"), TRIED)
def test_a_strategy_leaves_what_it_leaves_on_real_ranks(strategy: str, world_size: int) -> None:
    """In some trials of the catalogue, kept promises and known differences among them."""
    of = STRATEGIES[strategy]
    compare = "update" if of.trains else "gradients"
    every = [
        one.case
        for one in trials(strategy)
        if one.case.ranks.world_size == world_size and one.compare == compare
        if one.steps == 1 and not one.case.exact and one.case.dtype is of.dtype
    ]
    for case in every[:: max(1, len(every) // 3)]:
        assert_alike(case, strategy, compare=compare)


@pytest.mark.parametrize(
    "step", [ddp, fsdp1, divided_by_the_node, reduced_in_nodes, wrapper_dropped, clipped]
)
def test_a_step_of_ones_own_leaves_what_it_leaves_on_real_ranks(step: Any) -> None:
    assert_alike(own_case(layout="2x2"), step)


def test_an_update_is_that_of_real_ranks() -> None:
    assert_alike(own_case(layout="1x4"), trains, compare="update", lr=0.1)


@pytest.mark.parametrize(
    ("step", "fields", "said"),
    [
        (ddp, {}, "ddp: same"),
        (ddp, {}, "examples: each of the 64 on 1 rank"),
        (divided_by_the_node, {"layout": "8x2"}, "8.000 times the big batch (the number of nodes)"),
        (
            reduced_in_nodes,
            {},
            "ranks 4 to 7 (4): shares by ranks, 1 is as in the big batch: 0.000 (4 in a row), "
            "4.000 (4 in a row), 0.000 (8 in a row)",
        ),
        (reduced_in_nodes, {}, "all_reduce SUM in 4 groups of 4, one for each node: 4 times"),
        (wrapper_dropped, {}, "rank 0: shares by ranks, 1 is as in the big batch: 16.000, 0.000"),
        (wrapper_dropped, {}, "and 12 more groups of ranks"),
        (writes_to_its_batch, {"shards": "own"}, "writes_to_its_batch: same"),
        (one_rank_lacks_a_gradient, {}, "different: rank 1: 0.bias is None"),
        (four_times, {"dtype": torch.bfloat16}, " times the big batch examples: each of the 64"),
        (ddp, {"shards": "empty"}, "examples: each of the 64 on 1 rank"),
        (ddp, {"batch": with_equal_rows}, "examples: each of the 64 on 1 rank"),
        (
            sampled_by_local_rank,
            {"batch": with_equal_rows, "shards": "own"},
            "examples: it is not known which ones the ranks computed with",
        ),
        (sampled_by_local_rank, {"shards": "own"}, "examples: each of the 64 on 4 ranks"),
        (first_half_only, {"shards": "own"}, "examples: 32 of 64 on no ranks, 32 of 64 on 1 rank"),
        (
            unused_on_rank_3,
            {"layout": "1x4"},
            "unknown: the ranks wait for ever: ranks 0 to 2 for rank 3 in all_reduce",
        ),
    ],
)
def test_what_the_ranks_hold_is_said(step: Any, fields: dict[str, Any], said: str) -> None:
    assert said in text_of(simulate(own_case(**fields), step))


def test_what_is_simulated_says_so() -> None:
    assert "4x4: 16 ranks on 4 nodes, SIMULATED" in text_of(simulate(own_case(), ddp))


@pytest.mark.parametrize(
    ("strategy", "layout", "promised"),
    [
        ("ddp_mean", "8x8", None),
        ("manual_all_reduce_sum", "8x8", "sum_not_mean"),
        ("hybrid", "8x4", None),
        ("hsdp", "8x2", None),
        pytest.param("ddp_mean", "128x8", None, marks=pytest.mark.thorough),
        pytest.param("hybrid", "128x8", None, marks=pytest.mark.thorough),
    ],
)
def test_a_promise_is_kept_on_many_ranks(strategy: str, layout: str, promised: str | None) -> None:
    found = simulate(Case(model="mlp", loss="mse_mean", layout=layout), strategy)
    assert found.promised == promised
    assert found.keeps_promise, found.failure


def catalogue_case(model: str, layout: str) -> Case:
    return Case(model=model, loss="mse_mean", layout=layout)


@pytest.mark.parametrize(
    ("case", "step", "options", "message"),
    [
        (own_case(), ddp, {"steps": 2}, "simulated ranks take one step"),
        (catalogue_case("mlp", "1x2"), "data_parallel", {}, "runs in one process"),
        (catalogue_case("mlp", "1x2"), "hybrid_data_parallel", {}, "needs GPUs"),
        (catalogue_case("mlp", "1x2"), "ddp_compiled", {}, "compiles code"),
        (catalogue_case("mlp", "1x2"), "ddp_mean", {"compare": "update"}, "compared by it"),
        (catalogue_case("mlp", "1+3"), "hsdp", {}, "equally many ranks"),
        (catalogue_case("branch", "2x2"), "fsdp2", {}, "fsdp2 can train"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_simulated_is_refused(
    case: Case, step: Any, options: Any, message: str
) -> None:
    with pytest.raises(BadCase, match=message):
        simulate(case, step, **options)


def test_real_ranks_are_refused_beyond_what_a_machine_bears() -> None:
    case = Case(model="mlp", loss="mse_mean", layout=f"1x{MAX_PROCESSES + 1}")
    with pytest.raises(BadCase, match=r"at most 64 ranks, not 65.* simulate"):
        check(case, "ddp_mean")


def test_models_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "MOST_OF_MEMORY", 0.0)
    with pytest.raises(BadCase, match=r"fewer ranks, or a smaller model .* 16 copies of this one"):
        simulate(own_case(), ddp)
