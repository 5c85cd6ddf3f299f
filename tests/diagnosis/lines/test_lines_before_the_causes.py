"""Races, wrong collectives and steps that nobody watched: what is pointed at, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.diagnose import finding_of_wrong_collectives
from tests.package.pointed_at import Rows, faulty_lines, judged, mean_loss, shown, sum_loss

pytestmark = pytest.mark.self_check


def reduce(model: Any, wait: bool) -> None:
    handles = []
    for parameter in model.parameters():
        handle = dist.all_reduce(parameter.grad, async_op=True)  # the fault
        handles.append(handle)
    for handle in handles[: len(handles) if wait else 1]:
        handle.wait()


def nobody_waits(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    for parameter in model.parameters():
        parameter.grad /= 3 * rank.world_size
    reduce(model, wait=False)


def test_the_line_of_a_collective_that_nobody_waits_for_is_pointed_at() -> None:
    verdict = judged(nobody_waits)
    assert verdict.cause == "collective_not_waited_for", verdict
    assert ["# the fault" in line for line in faulty_lines(verdict)] == [True], shown(verdict)
    finding = verdict.findings[0]
    assert finding.lines[0].missing == "handle.wait()"
    assert "wait()" in finding.fix
    assert finding.headline == "a collective is not waited for"


def test_wrong_collectives_have_a_fix_and_no_line() -> None:
    finding = finding_of_wrong_collectives(["all_reduce gives 3, not 4"])
    assert (finding.headline, finding.lines) == ("the collectives themselves answer wrongly", ())
    assert "ddp-equivalence doctor" in finding.fix


def summed(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def averaged_sum(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    sum_loss(ddp, rows).backward()


@pytest.mark.ddp(second_look=False)
@pytest.mark.parametrize(
    ("step", "loss", "cause", "fix"),
    [
        (summed, mean_loss, "sum_not_mean", "or do not multiply the loss by it"),
        (averaged_sum, sum_loss, "mean_not_sum", "add the gradients up, or multiply"),
    ],
)
def test_a_step_that_nobody_watched_has_no_lines_and_no_fix_that_claims_to_know(
    step: object, loss: object, cause: str, fix: str
) -> None:
    verdict = judged(step, loss=loss)
    assert verdict.cause == cause, verdict
    assert verdict.findings[0].lines == ()
    assert fix in verdict.findings[0].fix
