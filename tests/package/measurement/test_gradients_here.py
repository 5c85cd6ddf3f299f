"""A watched step shows what becomes of the gradients of sharded parameters on each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.where.gradient_path import paths_of
from ddp_equivalence.diagnosis.where.pieces import Pieces, pieces_of
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
