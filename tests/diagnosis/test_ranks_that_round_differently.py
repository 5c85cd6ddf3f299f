"""Ranks that hold other bits than each other are told so, although each of them is right."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Rank, check
from tests.package.own_cases import loss, own_case


def around_a_ring(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank begins the sum with its own part, so each adds up in another order."""
    loss(model, shard).backward()
    after, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    for parameter in model.parameters():
        assert parameter.grad is not None
        total, part = parameter.grad.clone(), parameter.grad.clone()
        for _ in range(rank.world_size - 1):
            received = torch.empty_like(part)
            sending = dist.P2POp(dist.isend, part, after)
            receiving = dist.P2POp(dist.irecv, received, before)
            for handle in dist.batch_isend_irecv([sending, receiving]):
                handle.wait()
            total += received
            part = received
        parameter.grad = total / rank.world_size


def from_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    around_a_ring(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.broadcast(parameter.grad, src=0)


def with_a_small_error_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    from_one_rank(model, shard, rank)
    if rank.rank == 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1 + 2e-14


def test_a_ring_that_adds_up_in_another_order_on_each_rank_is_named() -> None:
    verdict = check(own_case(layout="1x4"), around_a_ring)
    assert (verdict.outcome, verdict.cause) == ("different", "ranks_differ_by_rounding")
    finding = verdict.findings[0]
    assert "broadcast the result from one rank" in finding.fix
    assert finding.lines[0].is_fault


def test_a_ring_whose_result_is_broadcast_is_right() -> None:
    assert check(own_case(layout="1x4"), from_one_rank).outcome == "same"


def test_an_error_on_one_rank_that_is_larger_than_rounding_is_not_called_rounding() -> None:
    verdict = check(own_case(layout="1x4"), with_a_small_error_on_one_rank)
    assert verdict.outcome == "different"
    assert "ranks_differ_by_rounding" not in verdict.causes
