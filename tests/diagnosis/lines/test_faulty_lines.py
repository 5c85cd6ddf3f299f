"""The report points at the faulty line of a step, which ends with ``# the fault``, and mends it."""

# DDP compares the annotations of a hook with classes. So this file must not import annotations from
# __future__, which turns them into strings.

import linecache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.diagnose import finding_of_wrong_collectives
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.report.render import pointed_lines
from ddp_equivalence.report.verdict import Verdict
from tests.package.pointed_at import (
    MARK,
    Rows,
    assert_points_at_the_fault,
    faulty_lines,
    judged,
    mean_loss,
    notes,
    shown,
    sum_loss,
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
        future: Future = work.get_future().then(lambda done: done.value()[0])
        return future

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


def scaled(model: Any, rows: Rows, rank: Rank) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp = DistributedDataParallel(model)
    loss = mean_loss(ddp, rows)
    scaled_loss = scaler.scale(loss)
    scaled_loss.backward()  # the fault


FAULTS = [
    (summed_in_a_hook, "sum_not_mean", "by 4, the number of ranks, in the hook"),
    (a_hook_that_keeps, "no_all_reduce", ""),
    (scaled, "gradient_scaled_not_unscaled", ""),
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


def average_(tensor: Any) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def budget_is_used_up(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    sent = 0
    for parameter in model.parameters():
        sent += parameter.numel()
        if sent > 80:
            break  # the fault
        average_(parameter.grad)


class Countdown:
    """Reduces all gradients once the last one is there."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.wanted = len(self.parameters) + 1  # the call
        self.ready = 0
        for one in self.parameters:
            one.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, parameter: torch.Tensor) -> None:
        self.ready += 1
        if self.ready == self.wanted:
            for one in self.parameters:
                average_(one.grad)


def waits_for_one_more(model: Any, rows: Rows, rank: Rank) -> None:
    Countdown(model)
    mean_loss(model, rows).backward()


def test_the_line_that_left_the_loop_of_a_reduction_is_shown() -> None:
    verdict = judged(budget_is_used_up)
    assert "breaks from inside the loop of line" in note_of_the_fault(verdict)


def test_the_line_that_set_what_a_condition_compares_is_shown() -> None:
    verdict = judged(waits_for_one_more)
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
        (averaged_sum, sum_loss, "mean_not_sum", "multiply the loss by 4"),
    ],
)
def test_a_step_that_nobody_watched_has_no_lines_and_no_fix_that_claims_to_know(
    step: object, loss: object, cause: str, fix: str
) -> None:
    verdict = judged(step, loss=loss)
    assert verdict.cause == cause, verdict
    assert verdict.findings[0].lines == ()
    assert fix in verdict.findings[0].fix


def last_under_no_sync(model: Any, batch: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    parts = list(zip(*(leaf.chunk(4) for leaf in batch.values()), strict=True))
    for number, (x, y) in enumerate(parts):
        synchronises = number == 0
        if synchronises:
            mean_loss(ddp, {"x": x, "y": y}).div(4).backward()
        else:
            with ddp.no_sync():
                mean_loss(ddp, {"x": x, "y": y}).div(4).backward()


def test_a_block_that_python_comes_back_to_is_counted_once() -> None:
    verdict = judged(last_under_no_sync, layout="1x4")
    assert verdict.cause == "accumulation_boundary_off_by_one"
    assert "synchronises is false 3 of 4 times" in notes(verdict)
