"""Torch's flight recorder forgets old collectives; they are counted all the same."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_equivalence import Rank, Verdict, check
from tests.package.own_cases import own_case, right_step


def calls_100_barriers(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    for _ in range(100):
        dist.barrier()


def test_more_collectives_than_the_recorder_holds_are_counted() -> None:
    """DDP's all_reduce is among the forgotten ones. That must not count as none at all."""
    verdict = check(own_case(), calls_100_barriers)
    assert verdict.outcome == "same"
    counts = re.search(r"rank 0 issued (\d+) \w+ .* \(and (\d+) earlier ones", one_line(verdict))
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 104
    next_verdict = check(own_case(), right_step)
    assert "1 all_reduce of 66 elements" in one_line(next_verdict)
    assert "earlier ones" not in one_line(next_verdict)


def one_line(verdict: Verdict) -> str:
    return " ".join(str(verdict).split())
