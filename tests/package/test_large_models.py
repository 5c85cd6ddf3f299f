"""Whoever compares the gradients, the ranks or the judging process, the report is the same."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, Verdict, check
from ddp_equivalence.case import settings
from ddp_equivalence.checking import large_models
from ddp_equivalence.checking.large_models import BigBatch
from ddp_equivalence.comparison import comparison, rounding
from ddp_equivalence.comparison.shared import NO_ROOM, READY, SharedGradients
from ddp_equivalence.diagnosis import draws, shares
from ddp_equivalence.measurement import measure
from ddp_equivalence.measurement.request import read_request
from ddp_equivalence.report.evidence import BY_THE_RANKS

pytestmark = pytest.mark.self_check

Batch = dict[str, Tensor]


def build() -> nn.Module:
    """Three layers, of which 7 and 3 rows are shared out unevenly."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def build_even() -> nn.Module:
    """Of which tensor parallelism can halve the first layer."""
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))


def rows(generator: torch.Generator) -> Batch:
    return {"rows": torch.randn(8, 5, generator=generator)}


def loss(model: Any, batch: Batch) -> Any:
    return model(batch["rows"]).square().mean()


def ddp(model: Any, shard: Batch, rank: Rank) -> None:
    wrapper = DistributedDataParallel(model)
    loss(wrapper, shard).backward()


def fsdp2(model: Any, shard: Batch, rank: Rank) -> None:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    loss(model, shard).backward()


def hsdp(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("all", "shard")))
    loss(model, shard).backward()


def tensor_parallel(model: Any, shard: Batch, rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    parts = [torch.empty_like(shard["rows"]) for _ in range(4)]
    dist.all_gather(parts, shard["rows"])
    first = 2 * (rank.rank // 2)
    loss(model, {"rows": torch.cat(parts[first : first + 2])}).backward()


def summed(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model)
    (loss(model, shard) * rank.world_size).backward()


def only_one_rank(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model)
    (loss(model, shard) * (rank.rank == 0)).backward()


def scaled_in_places(model: Any, shard: Batch, rank: Rank) -> None:
    """One element of the second block is wrong."""
    fully_shard(model)
    loss(model, shard).backward()
    if rank.rank == 1:
        model[2].weight.grad.to_local()[1, 2] += 1


def one_node_is_wrong(model: Any, shard: Batch, rank: Rank) -> None:
    """The shards of the second node, which the first one has as well, are wrong."""
    hsdp(model, shard, rank)
    if rank.node == 1:
        model[2].weight.grad.to_local().mul_(3)


def leaves_one_out(model: Any, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    for name, parameter in model.named_parameters():
        if name != "2.bias":
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    model[4].bias.grad = None


def verdict_of(step: Any, layout: str, model: Any, by_ranks: bool) -> Verdict:
    case = Case(model=model, batch=rows, loss=loss, layout=layout)
    with settings.using(settings.replaced(compared_by_ranks=by_ranks, trial_seconds=0.0)):
        verdict = check(case, step)
    assert verdict.comparison is not None, verdict
    assert verdict.comparison.by_the_ranks is by_ranks
    return verdict


@pytest.mark.parametrize(
    ("step", "layout", "model", "outcome"),
    [
        (ddp, "1x2", build, "same"),
        (fsdp2, "1x2", build, "same"),
        (fsdp2, "1x4", build, "same"),
        (hsdp, "2x2", build, "same"),
        (tensor_parallel, "2x2", build_even, "same"),
        (summed, "1x2", build, "different"),
        (only_one_rank, "1x2", build, "different"),
        (scaled_in_places, "1x2", build, "different"),
        (one_node_is_wrong, "2x2", build, "different"),
        (leaves_one_out, "1x2", build, "different"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_ranks_that_compare_their_own_gradients_come_to_the_same_report(
    step: Any, layout: str, model: Any, outcome: str
) -> None:
    sent, compared = (verdict_of(step, layout, model, by) for by in (False, True))
    assert compared.outcome == sent.outcome == outcome
    assert compared.cause == sent.cause
    texts = [" ".join(str(one).split()) for one in (sent, compared)]
    if outcome == "same":
        assert texts[1].count(BY_THE_RANKS) == 1
    assert re.sub(re.escape(BY_THE_RANKS), "", texts[1]) == texts[0]


def test_rounding_is_not_measured_where_the_ranks_hold_a_multiple(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The big batch of a large model takes long, and measuring rounding three times as long."""
    measured: list[object] = []

    def measure_rounding(*arguments: Any, **named: Any) -> Any:
        measured.append(arguments)
        return whole(*arguments, **named)

    whole = rounding.measure_rounding
    monkeypatch.setattr(rounding, "measure_rounding", measure_rounding)
    monkeypatch.setattr(comparison, "LARGE", 1)
    case = Case(model=build, batch=rows, loss=loss, layout="1x2", dtype=torch.float32)
    for step, takes_rounding in ((summed, False), (scaled_in_places, True)):
        measured.clear()
        with settings.using(settings.replaced(compared_by_ranks=True, trial_seconds=0.0)):
            verdict = check(case, step)
        assert verdict.outcome == "different"
        assert bool(measured) is takes_rounding, step


def cancelling_loss(model: Any, batch: Batch) -> Any:
    """In float32 the outputs lose their last digits, and so does the gradient."""
    return (model(batch["rows"]) + 1e4 - 1e4).square().mean()


def cancelling(model: Any, shard: Batch, rank: Rank) -> None:
    wrapper = DistributedDataParallel(model)
    cancelling_loss(wrapper, shard).backward()


def slightly_more(model: Any, shard: Batch, rank: Rank) -> None:
    wrapper = DistributedDataParallel(model)
    (1.01 * cancelling_loss(wrapper, shard)).backward()


@pytest.mark.parametrize(
    ("step", "outcome", "runs"), [(cancelling, "same", 0), (slightly_more, "different", 1)]
)
def test_one_run_of_a_large_big_batch_may_explain_the_rounding(
    step: Any, outcome: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it does not, all runs are made that a small model would get."""
    measured: list[object] = []

    def measure_rounding(*arguments: Any, **named: Any) -> Any:
        measured.append(arguments)
        return whole(*arguments, **named)

    whole = rounding.measure_rounding
    monkeypatch.setattr(rounding, "measure_rounding", measure_rounding)
    case = Case(model=build, batch=rows, loss=cancelling_loss, layout="1x2", dtype=torch.float32)
    with settings.using(settings.replaced(compared_by_ranks=True, trial_seconds=0.0)):
        small = check(case, step)
        assert measured
        measured.clear()
        monkeypatch.setattr(measure, "LARGE", 1)
        large = check(case, step)
    assert (small.outcome, large.outcome) == (outcome, outcome), (small, large)
    assert (len(measured) > 0) == (runs > 0)
    assert large.comparison is not None
    assert small.comparison is not None
    limits = zip(large.comparison.parameters, small.comparison.parameters, strict=True)
    assert all(one.limit.relative <= other.limit.relative for one, other in limits)


def test_a_large_model_is_not_built_again_only_to_compare_its_first_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[int] = []

    def count_here(*arguments: Any) -> nn.Module:
        built.append(os.getpid())
        return build()

    def judged(compared_by_ranks: bool) -> int:
        built.clear()
        case = Case(model=count_here, batch=rows, loss=loss, layout="1x2")
        with settings.using(settings.replaced(compared_by_ranks=compared_by_ranks)):
            verdict = check(case, ddp)
        assert verdict.outcome == "same", verdict
        return built.count(os.getpid())

    assert judged(True) < judged(False)


def build_by_rank() -> nn.Module:
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    return build()


def test_other_weights_of_a_rank_are_unknown_if_the_ranks_compare() -> None:
    with settings.using(settings.replaced(compared_by_ranks=True)):
        verdict = check(Case(model=build_by_rank, batch=rows, loss=loss, layout="1x2"), ddp)
    assert verdict.outcome == "unknown", verdict
    assert "builds other weights than the reference" in verdict.reason


def twice_as_much(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model)
    (rank.world_size * loss(model, shard)).backward()


def only_one_block(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model[0])
    fully_shard(model, ignored_params=set(model[2].parameters()))
    loss(model, shard).backward()


@pytest.mark.parametrize(
    ("step", "cause"),
    [(twice_as_much, "sum_not_mean"), (only_one_block, "ignored_parameter")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_of_sharding_is_named_from_a_sample_of_the_elements(
    step: Any, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that is too large to keep all elements of its gradients."""
    monkeypatch.setattr(shares, "MAX_ELEMENTS", 100)
    monkeypatch.setattr(shares, "MAX_SELECTED", 160)
    verdict = verdict_of(step, "1x2", build, by_ranks=True)
    assert verdict.view is not None
    assert not verdict.view.parameters.sample.is_whole
    assert (verdict.outcome, verdict.cause) == ("different", cause), verdict


def test_a_small_model_sends_its_gradients_and_a_large_one_compares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(model=build, batch=rows, loss=loss, layout="1x2")
    verdict = check(case, ddp)
    assert verdict.comparison is not None
    assert not verdict.comparison.by_the_ranks
    monkeypatch.setattr(large_models, "COMPARED_BY_RANKS", 111)
    verdict = check(case, ddp)
    assert verdict.outcome == "same"
    assert verdict.comparison is not None
    assert verdict.comparison.by_the_ranks


def test_on_a_full_disk_the_ranks_send_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shared: SharedGradients, *_: object) -> None:
        os.pwrite(shared._file.fileno(), NO_ROOM.to_bytes(READY, "little"), 0)

    monkeypatch.setattr(SharedGradients, "put", full)
    case = Case(model=build, batch=rows, loss=loss, layout="1x2")
    with settings.using(settings.replaced(compared_by_ranks=True)):
        verdict = check(case, fsdp2)
    assert verdict.outcome == "same"
    assert verdict.comparison is not None
    assert not verdict.comparison.by_the_ranks


@pytest.mark.parametrize(("available", "comes_first"), [(10**12, False), (111 * 16, True)])
def test_without_room_for_both_the_big_batch_comes_before_the_ranks(
    available: int, comes_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_models, "COMPARED_BY_RANKS", 111)
    memory = type("Memory", (), {"available": available, "total": 10**12})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    request = read_request(Case(model=build, batch=rows, loss=loss, layout="1x2"), ddp, {})
    big_batch = BigBatch(request)
    with big_batch.prepared():
        assert (big_batch._before is not None) is comes_first
        assert big_batch.expected().reference.expected.keys() == {
            (0, name) for name, _ in build().named_parameters()
        }


def noisy(model: Any, batch: Batch) -> Any:
    given = batch["rows"]
    return model(given + 0.1 * torch.randn_like(given)).square().mean()


@pytest.mark.parametrize(("of_the_case", "is_built_for_draws"), [(loss, False), (noisy, True)])
def test_a_large_model_is_built_again_for_its_draws_only_if_it_has_drawn(
    of_the_case: Any, is_built_for_draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[object] = []

    def count(setting: Any, examples: int) -> Any:
        drawn.append(examples)
        return whole(setting, examples)

    whole = draws._drawn
    monkeypatch.setattr(draws, "_drawn", count)
    monkeypatch.setattr(shares, "MAX_ELEMENTS", 100)
    monkeypatch.setattr(shares, "MAX_SELECTED", 160)

    def tripled(model: Any, shard: Batch, rank: Rank) -> None:
        (3 * of_the_case(DistributedDataParallel(model), shard)).backward()

    with settings.using(settings.replaced(compared_by_ranks=True, trial_seconds=0.0)):
        verdict = check(Case(model=build, batch=rows, loss=of_the_case, layout="1x2"), tripled)
    assert verdict.outcome == "different", verdict
    assert bool(drawn) is is_built_for_draws


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(5, 3)
        self.exact = nn.Linear(5, 3).double()

    def forward(self, rows: Tensor) -> Any:
        of_singles = self.single(rows.to(self.single.weight.dtype)).double()
        return torch.cat([of_singles, self.exact(rows.double())])


def test_parameters_in_float64_are_compared_with_numbers_in_float64() -> None:
    """Also beside others in float32, by which the numbers of all are as precise."""
    case = Case(model=TwoTypes, batch=rows, loss=loss, layout="1x2", dtype=None)
    with settings.using(settings.replaced(compared_by_ranks=True)):
        verdict = check(case, ddp)
    assert verdict.outcome == "same", verdict
    assert verdict.comparison is not None
    assert verdict.comparison.by_the_ranks
    limits = {one.name: one.limit.relative for one in verdict.comparison.parameters}
    assert limits["exact.weight"] < 1e-12 < limits["single.weight"]
