"""The report points at the faulty line of a step, which ends with ``# the fault``, and mends it."""

# DDP compares the annotations of a hook with classes. So this file must not import annotations from
# __future__, which turns them into strings.

import linecache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.diagnose import finding_of_wrong_collectives
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.report.render import pointed_lines
from ddp_equivalence.report.verdict import Verdict
from tests.diagnosis.lines import steps_with_helpers as steps
from tests.package.pointed_at import (
    MARK,
    Rows,
    assert_points_at_the_fault,
    faulty_lines,
    halves,
    judged,
    mean_loss,
    quarters,
    shown,
    sum_loss,
    when_done,
)

pytestmark = pytest.mark.self_check


Future = torch.futures.Future[torch.Tensor]


class SumsInAHook:
    """A trainer whose communication hook adds up and does not divide."""

    def __init__(self, model: Any) -> None:
        self.ddp = DistributedDataParallel(model)
        self.ddp.register_comm_hook(None, self.hook)

    @staticmethod
    def hook(state: object, bucket: GradBucket) -> Future:
        values = bucket.buffer()
        work: Any = dist.all_reduce(values, async_op=True)  # the fault
        return when_done(work, lambda future: future.value()[0])

    def step(self, rows: Rows) -> None:
        mean_loss(self.ddp, rows).backward()


def summed_in_a_hook(model: Any, rows: Rows, rank: Rank) -> None:
    SumsInAHook(model).step(rows)


def keep(state: object, bucket: GradBucket) -> Future:
    done: Future = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def a_hook_that_keeps(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, keep)  # the fault
    mean_loss(ddp, rows).backward()


def loss_times_ranks(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    outputs = ddp(rows["x"])
    loss = nn.functional.mse_loss(outputs, rows["y"])
    scaled = loss * rank.world_size  # the fault
    scaled.backward()


def sum_with_avg(model: Any, rows: Rows, rank: Rank) -> None:
    sum_loss(model, rows).backward()
    flat = torch.cat([one.grad.reshape(-1) for one in model.parameters()])
    gathered = [torch.empty_like(flat) for _ in range(rank.world_size)]
    dist.all_gather(gathered, flat)
    flat = torch.stack(gathered).mean(0)
    at = 0
    for parameter in model.parameters():
        size = parameter.numel()
        parameter.grad.copy_(flat[at : at + size].view_as(parameter))
        at += size


def divided_after_ddp(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    mean_loss(ddp, rows).backward()
    clip_grad_norm_(model.parameters(), 1e9)
    for parameter in model.parameters():
        parameter.grad /= rank.world_size  # the fault


def average(model: Any, rank: Rank) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


class Accumulator:
    """Adds up micro-batches by hand."""

    def __init__(self, model: Any, rank: Rank) -> None:
        self.model, self.rank = model, rank

    def backward(self, part: Rows) -> None:
        mean_loss(self.model, part).backward()  # the fault

    def window(self, rows: Rows) -> None:
        for part in halves(rows):
            self.backward(part)
        average(self.model, self.rank)


def not_divided_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    Accumulator(model, rank).window(rows)


def reduced_before_the_last(model: Any, rows: Rows, rank: Rank) -> None:
    parts = quarters(rows)
    for number, part in enumerate(parts):
        (mean_loss(model, part) / len(parts)).backward()
        if number == len(parts) - 2:
            flat = [parameter.grad for parameter in model.parameters()]
            for gradient in flat:
                gradient /= rank.world_size
                dist.all_reduce(gradient)  # the fault


def two_passes(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    probe = mean_loss(ddp, rows)
    probe.backward()  # the fault
    clip_grad_norm_(model.parameters(), 1e9)
    mean_loss(ddp, rows).backward()


def scaled(model: Any, rows: Rows, rank: Rank) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp = DistributedDataParallel(model)
    loss = mean_loss(ddp, rows)
    scaled_loss = scaler.scale(loss)
    scaled_loss.backward()  # the fault


def scaled_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    scale = 2.0**12
    loss = mean_loss(model, rows)
    larger = loss * scale
    larger.backward()  # the fault
    average(model, rank)


FAULTS = [
    (summed_in_a_hook, "sum_not_mean", "by 4, the number of ranks, in the hook"),
    (a_hook_that_keeps, "no_all_reduce", ""),
    (loss_times_ranks, "sum_not_mean", "do not multiply the loss by 4"),
    (divided_after_ddp, "averaged_twice", ""),
    (not_divided_by_hand, "accumulation_not_divided", "divide each loss by 2"),
    (reduced_before_the_last, "accumulation_boundary_off_by_one", ""),
    (two_passes, "stale_gradient_added", ""),
    (scaled, "gradient_scaled_not_unscaled", ""),
    (scaled_by_hand, "gradient_scaled_not_unscaled", ""),
]


@pytest.mark.parametrize(("step", "cause", "fix"), FAULTS)
def test_the_faulty_line_is_pointed_at(step: Any, cause: str, fix: str) -> None:
    assert_points_at_the_fault(judged(step), cause, fix)


def test_a_mean_of_gathered_gradients_has_no_line_that_divides() -> None:
    verdict = judged(sum_with_avg, loss=sum_loss)
    assert verdict.cause == "mean_not_sum", verdict
    assert "no line divides" not in shown(verdict)


def marked(verdict: Verdict, mark: str) -> list[PointedLine]:
    """The lines of the report that end with this comment."""
    return [
        one
        for one in pointed_lines(verdict)
        if mark in linecache.getline(one.line.file, one.line.number)
    ]


def note_of_the_fault(verdict: Verdict) -> str:
    """What the report says of the marked line, which it must show and call the fault."""
    assert verdict.outcome == "different", verdict
    found = marked(verdict, MARK)
    assert [one.is_fault for one in found] == [True], verdict
    return found[0].note


def test_the_line_that_left_the_loop_of_a_reduction_is_shown() -> None:
    verdict = judged(steps.budget_is_used_up)
    assert "breaks from inside the loop of line" in note_of_the_fault(verdict)


def test_the_line_that_set_what_a_condition_compares_is_shown() -> None:
    verdict = judged(steps.waits_for_one_more)
    assert "sets wanted, which line" in marked(verdict, "# the call")[0].note


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
        (averaged_sum, sum_loss, "mean_not_sum", "add the gradients up"),
    ],
)
def test_a_step_that_nobody_watched_has_no_lines_and_no_fix_that_claims_to_know(
    step: object, loss: object, cause: str, fix: str
) -> None:
    verdict = judged(step, loss=loss)
    assert verdict.cause == cause, verdict
    assert verdict.findings[0].lines == ()
    assert fix in verdict.findings[0].fix
