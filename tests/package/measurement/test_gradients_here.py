"""A watched step shows what becomes of the gradients of sharded parameters on each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

from benchmarks.steps.keys import OPENED, verdict_of
from ddp_equivalence import Case, check
from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.where.gradient_path import paths_of
from ddp_equivalence.diagnosis.where.pieces import Pieces, pieces_of
from ddp_equivalence.measurement import gradient_changes
from ddp_equivalence.measurement.calls import packed
from ddp_equivalence.measurement.gradient_changes import parts_of
from ddp_equivalence.measurement.gradient_watch import MOST_WEIGHTS, WeightWatch
from ddp_equivalence.measurement.sharded_gradients import UNKNOWN
from ddp_equivalence.measurement.whole_tensors import reduce_dtype_among
from ddp_equivalence.ranks.collectives import Issued
from ddp_equivalence.report.render import pointed_lines
from ddp_equivalence.report.verdict import Verdict

pytestmark = pytest.mark.self_check


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


CASE = Case(model=build, batch=rows, loss=loss, layout="1x2")


def fsdp2(model: Any, rank: Any) -> Any:
    fully_shard(model[0])
    return fully_shard(model)


def fsdp1(model: Any, rank: Any, *, originals: bool) -> Any:
    return FullyShardedDataParallel(model, device_id=rank.device, use_orig_params=originals)


WRAPS = {
    "fsdp2": fsdp2,
    "fsdp1": partial(fsdp1, originals=False),
    "fsdp1_with_originals": partial(fsdp1, originals=True),
}


def doubled(model: Any, shard: Any, rank: Any, wrap: Any) -> None:
    wrapped = wrap(model, rank)
    loss(wrapped, shard).backward()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0)  # doubles


def tripled_by_foreach(model: Any, shard: Any, rank: Any) -> None:
    fully_shard(model)
    loss(model, shard).backward()
    torch._foreach_mul_([one.grad for one in model.parameters()], 3.0)


def pieces(verdict: Verdict) -> Pieces:
    assert verdict.view is not None, str(verdict)
    found = pieces_of(verdict.view)
    assert found is not None
    return found


@pytest.mark.parametrize("name", WRAPS)
def test_what_backward_computes_is_known_before_it_is_reduced(name: str) -> None:
    verdict = check(CASE, partial(doubled, wrap=WRAPS[name]))
    of_ranks = pieces(verdict)
    assert [len(one) for one in of_ranks.by_rank] == [1, 1]
    for piece in of_ranks.all:
        alone = of_ranks.alone(piece)
        assert alone is not None
        assert torch.allclose(piece.gradient, alone.gradient)
    assert of_ranks.uniform_weight == pytest.approx(1.0)  # twice their mean


@pytest.mark.parametrize("name", WRAPS)
def test_a_rank_shows_how_its_part_changes(name: str) -> None:
    verdict = check(CASE, partial(doubled, wrap=WRAPS[name]))
    every = paths_of(pieces(verdict))
    assert {one.rank for one in every} == {0, 1}
    assert all(one.as_left for one in every)
    paths = [one for one in every if one.states]  # a rank may have no part of a small gradient
    for at, weight in ((0, 0.5), (-1, 1.0)):
        mixes = [one.states[at].mix for one in paths]
        assert [one and one.uniform for one in mixes] == pytest.approx([weight] * len(paths))
    found = verdict.localisation.whereabouts
    assert found is not None
    faults = [one.line.number for one in found.lines if one.is_fault]
    assert faults == [doubled.__code__.co_firstlineno + 6], str(verdict)


class Attention(nn.Module):
    """Reads the weights of a layer that it does not call, as torch's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Any:
        rows = rows[:, None, :4] + rows[:, None, 1:]
        return self.head(self.attention(rows, rows, rows, need_weights=False)[0][:, 0])


@pytest.mark.parametrize("name", ["whole", *WRAPS])
def test_weights_of_a_layer_that_is_not_called_are_heard(name: str) -> None:
    wraps = {**WRAPS, "fsdp2": whole, "whole": whole}
    verdict = check(replace(CASE, model=Attention), partial(doubled, wrap=wraps[name]))
    for piece in pieces(verdict).all:
        alone = pieces(verdict).alone(piece)
        assert alone is not None
        assert torch.allclose(piece.gradient, alone.gradient)


def whole(model: Any, rank: Any) -> Any:
    return fully_shard(model)


def ignores_one(model: Any, rank: Any) -> Any:
    return fully_shard(model, ignored_params={model[0].weight})


def test_a_weight_that_fsdp_ignores_counts_once() -> None:
    verdict = check(CASE, partial(doubled, wrap=ignores_one))
    for piece in pieces(verdict).all:
        alone = pieces(verdict).alone(piece)
        assert alone is not None
        assert torch.allclose(piece.gradient, alone.gradient)


def calls_with_other_weights(model: Any, shard: Any, rank: Any) -> None:
    weights = dict(model.named_parameters())
    moved = {name: one * 1.0 for name, one in weights.items()}
    outputs = torch.func.functional_call(model, moved, shard[0])
    (3.0 * nn.functional.mse_loss(outputs, shard[1])).backward()


def test_a_gradient_through_other_weights_counts_once() -> None:
    verdict = check(replace(CASE, layout="1x1"), calls_with_other_weights)
    assert verdict.view is not None
    (own,) = pieces(verdict).all
    assert torch.allclose(own.gradient, 3.0 * verdict.view.expected)


def test_each_rank_has_its_own_part() -> None:
    verdict = check(CASE, partial(doubled, wrap=fsdp2))
    view = verdict.view
    assert view is not None
    has = view.observed.parts_of_ranks(view.parameters)
    assert has is not None
    assert bool((has.sum(0) == 1).all())
    assert [int(one.sum()) for one in has] == [5 * 4 + 4 + 7 * 2 + 2, 5 * 3 + 3 + 7 + 1]
    first = replace(view.observed.by_rank[0], parts={"0.weight": packed(UNKNOWN)})
    unknown = replace(view.observed, by_rank={**view.observed.by_rank, 0: first})
    assert unknown.parts_of_ranks(view.parameters) is None


def test_a_type_to_reduce_in_counts_if_it_is_narrower_than_that_of_the_weights() -> None:
    narrow = torch.bfloat16
    for of_weights, told in ((None, "bfloat16"), (torch.float32, "bfloat16"), (narrow, "")):
        policy = MixedPrecisionPolicy(param_dtype=of_weights, reduce_dtype=narrow)
        assert reduce_dtype_among({"mp_policy": policy}) == told
    assert reduce_dtype_among({"module": None}) == ""


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def clips_and_steps_too_far(model: Any, shard: Any, rank: Any) -> None:
    strategy = ShardingStrategy.NO_SHARD
    flat = FullyShardedDataParallel(model, device_id=rank.device, sharding_strategy=strategy)
    of_model = torch.optim.SGD(flat.parameters(), lr=0.2, momentum=0.9)
    loss(flat, shard).backward()
    torch.nn.utils.clip_grad_norm_(flat.parameters(), 0.01)
    of_model.step()


def test_flat_gradients_are_compared_as_they_were_before_they_were_clipped() -> None:
    options: Any = {"compare": "update", "optimizer": optimizer, "clip": 0.01}
    verdict = check(CASE, clips_and_steps_too_far, **options)
    assert verdict.wrong_step is not None, str(verdict)
    assert verdict.wrong_step.differs == "weights"
    assert "new leaf" not in str(verdict)


def joins_different_shards(model: Any, shard: Any, rank: Any) -> Any:
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    node = groups[rank.node]
    flat = FullyShardedDataParallel(
        model,
        process_group=(node, node),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=rank.device,
        use_orig_params=True,
    )
    loss(flat, shard).backward()
    with FullyShardedDataParallel.summon_full_params(flat, with_grads=True):
        parameters: dict[str, Any] = dict(flat.named_parameters())
        found = {name: one.grad.clone() for name, one in parameters.items()}
    return {name.replace("_fsdp_wrapped_module.", ""): one for name, one in found.items()}


def test_groups_that_add_up_different_shards_are_marked_and_no_line_of_backward() -> None:
    with settings.using(settings.replaced(trial_seconds=0.0)):
        verdict = check(replace(CASE, layout="2x2"), joins_different_shards)
    found = verdict.localisation.whereabouts
    assert verdict.outcome == "different"
    assert found is not None
    assert found.lines, str(verdict)
    marked = {one.line.number for one in found.lines if one.is_fault and one.line is not None}
    begin = joins_different_shards.__code__.co_firstlineno
    assert marked, str(verdict)
    assert marked <= set(range(begin + 1, begin + 9)), str(verdict)  # until the model is wrapped


def test_a_change_that_raises_no_version_is_seen_at_its_line() -> None:
    verdict = check(CASE, tripled_by_foreach)
    changes = [one for one in verdict.observed[0].calls if one.change is not None]
    assert [one.change.factor for one in changes if one.change] == [pytest.approx(3.0)]
    assert changes[0].change is not None
    assert changes[0].change.exact


def accumulates_and_clears(model: Any, shard: Any, rank: Any) -> None:
    fully_shard(model)
    for last, half in enumerate(((shard[0][:3], shard[1][:3]), (shard[0][3:], shard[1][3:]))):
        model.set_requires_gradient_sync(bool(last))
        (loss(model, half) / 2).backward()
    model.zero_grad()


def test_a_step_that_clears_what_fsdp_has_reduced_is_not_told_of_another_line() -> None:
    verdict = check(CASE, accumulates_and_clears)
    assert verdict.outcome == "unknown"
    assert "zero_grad, compare the weights instead" in " ".join(str(verdict).split())


def test_a_gradient_that_fsdp_was_told_not_to_reduce_is_no_mystery() -> None:
    verdict = check(CASE, never_reduced)
    assert verdict.outcome == "unknown"
    number = never_reduced.__code__.co_firstlineno + 2
    assert f"line {number} of test_gradients_here.py tells FSDP not to" in str(verdict)


def never_reduced(model: Any, shard: Any, rank: Any) -> None:
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    loss(model, shard).backward()


def test_a_sum_and_a_division_that_cancel_do_not_explain_a_penalty() -> None:
    verdict = verdict_of(OPENED / "sa16_weight_penalty.py")
    assert (verdict.outcome, verdict.causes) == ("different", ()), str(verdict)


def test_the_line_in_which_fsdp_gathers_is_not_marked() -> None:
    file = OPENED / "sc09_hybrid_groups.py"
    verdict = verdict_of(file)
    assert verdict.outcome == "different"
    marked = [one.line for one in pointed_lines(verdict) if one.is_fault]
    lines = file.read_text("utf-8").splitlines()
    assert [lines[one.number - 1].strip() for one in marked if one] == [
        "replication = self.new(self.by_node)"
    ], str(verdict)


def test_the_weights_of_a_large_model_are_let_go_when_shards_take_their_places() -> None:
    weight = nn.Parameter(torch.zeros(1).expand(MOST_WEIGHTS + 1))
    left, parameters = ref(weight), {"weight": weight}
    watch = WeightWatch(parameters)
    del weight
    parameters["weight"] = nn.Parameter(torch.zeros(1), requires_grad=False)
    assert left() is None
    assert watch.changed(by_value=True) == ((), "")
    assert watch.switched() == {False: ("weight",)}


def test_what_is_sent_is_not_looked_for_in_many_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = torch.arange(1.0, 9.0)
    issued = Issued("all_reduce", "SUM", (0, 1), (sent,), asynchronous=False)
    held = {"weight": torch.cat([torch.zeros(3), sent])}
    assert parts_of(issued, held) == ("weight",)
    monkeypatch.setattr(gradient_changes, "MOST_ELEMENTS_SEARCHED", 10)
    monkeypatch.setattr(gradient_changes, "_values", pytest.fail)
    assert parts_of(issued, held) == ()
