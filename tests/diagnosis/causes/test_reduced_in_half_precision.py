"""A hook that reduces in half precision is named if it is the only cause, and hides no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case.losses import LOSSES
from tests.diagnosis.causes.named import accepted, different, first_finding

pytestmark = pytest.mark.self_check

Step = Callable[[nn.Module, Any, Rank], None]


def step_of(loss: str, dtype: torch.dtype | None = None, divides: bool = True) -> Step:
    """A step under DDP, whose hook casts to this type, adds, and divides by the number of ranks."""

    # DDP would not accept annotations that are strings.
    def reduce(state, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        narrow = buffer.to(dtype).div_(dist.get_world_size() if divides else 1)
        future = dist.all_reduce(narrow, async_op=True).get_future()
        return future.then(lambda reduced: buffer.copy_(reduced.value()[0]))

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        if dtype is not None or not divides:
            ddp.register_comm_hook(None, reduce)
        LOSSES[loss](ddp, shard).backward()

    return step


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_hook_alone_is_named(dtype: torch.dtype, half: torch.dtype) -> None:
    case = Case(model="conv", loss="cross_entropy_mean", layout="2x2", dtype=dtype)
    verdict = different(case, step_of("cross_entropy_mean", half))
    assert accepted(verdict) == {"low_precision_reduce"}, verdict
    assert "a reduction ran in" in first_finding(verdict).because


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("model", "loss", "divides", "cause"),
    [
        ("gru_tied", "token_mean", True, "token_counts_weighted_equally"),
        ("mlp", "mse_sum", True, "mean_not_sum"),
        ("mlp", "mse_mean", False, "sum_not_mean"),
        ("mlp", "contrastive", True, "contrastive_local_negatives"),
        ("batch_norm", "mse_mean", True, "batch_norm_local_statistics"),
        ("conv", "batch_statistics", True, "batch_statistics_local"),
        ("mlp", "root_mean_square", True, "statistic_not_additive"),
    ],
)
def test_another_cause_is_named_with_and_without_a_hook(
    model: str, loss: str, divides: bool, cause: str, half: torch.dtype | None
) -> None:
    verdict = different(Case(model=model, loss=loss, layout="2x2"), step_of(loss, half, divides))
    assert accepted(verdict) == {cause}, verdict
    rounding = "up to the rounding of a reduction in half precision"
    assert (rounding in first_finding(verdict).detail) == (half is not None)


def one_element_more(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The mistake of equal weights, with one element that no rounding explains."""
    step_of("token_mean", torch.bfloat16)(model, shard, rank)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[0] += 0.1 * gradient.abs().max()


def test_only_rounding_is_left_to_the_hook() -> None:
    verdict = check(Case(model="gru_tied", loss="token_mean", layout="2x2"), one_element_more)
    assert (verdict.outcome, verdict.cause) == ("different", None), verdict
