"""No report says that something was seen which was not, whatever fault was planted.

Every fault is planted in steps as users write them, by hand and under DDP. What a report says of
the calls, the reads and the wrappers is held against what was recorded of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.report.verdict import Verdict
from tests.combinations import each_once
from tests.diagnosis.names.claims import CLAIMS, false_claims
from tests.diagnosis.names.small_case import Step, by_hand, case, sums_up
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check


def report(verdict: Verdict) -> str:
    """All that is printed, in the short report and in the full one."""
    full = getattr(verdict, "full_report", verdict.__str__)
    return f"{verdict}\n{full()}"


def reduces_one_buffer(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / rank.world_size, gradients)


def wraps_with_several_buckets(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    squares(ddp, shard).backward()


def accumulates_under_ddp(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number, (rows, targets) in enumerate(
        zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True)
    ):
        with nullcontext() if number == 2 else ddp.no_sync():
            (F.mse_loss(ddp(rows), targets) / 3).backward()


OWN_STEPS = (
    by_hand(squares),
    reduces_one_buffer,
    wraps_with_several_buckets,
    accumulates_under_ddp,
)


ON_LAYOUTS = [(step, layout) for layout in ("1x2", "2x2") for step in OWN_STEPS]


@pytest.mark.parametrize(("fault", "step", "layout"), each_once(sorted(FAULTS), ON_LAYOUTS))
def test_a_report_on_a_planted_fault_says_only_what_was_seen(
    fault: str, step: Step, layout: str
) -> None:
    shown = case(layout, model=with_batch_norm) if "norm" in fault else case(layout)
    with planted(fault):
        verdict = check(shown, step, deadline=10.0)  # some faults let a step hang
        text = report(verdict)
    assert false_claims(verdict, text) == [], text


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def test_a_claim_without_its_record_is_found() -> None:
    """Every claim can fail: none of these things happened in a right step that sums."""
    verdict = check(case(), sums_up(squares))
    text = "It was FREED before backward, and clip_grad_norm_ was called with max_norm 1"
    assert len(false_claims(verdict, text)) == 2
    assert len({claim.pattern for claim in CLAIMS}) == len(CLAIMS)
