"""Tests that ``test_rehearsed.py`` runs on pretended GPUs: what differs on a GPU, and how.

Pytest collects this file only where it is named.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, Verdict, check
from ddp_equivalence.diagnosis import analysis
from ddp_equivalence.diagnosis.unknown import UnknownBecause


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(16, 6, generator=generator),
        "targets": torch.randn(16, 3, generator=generator),
    }


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 3))


class CallsDropout(nn.Module):
    """A model that calls the function, and has no module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.outer(nn.functional.dropout(self.inner(rows), 0.1, self.training))
        return output


def without() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def case(model: Any, layout: str = "1x2") -> Case:
    return Case(model=model, batch=make_batch, loss=loss, layout=layout)


def averages(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def trains_in_ddp(model: nn.Module, shard: Any, rank: Rank) -> None:
    model.train()
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def sums(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def reduces_one_parameter(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    dist.all_reduce(gradient)
    gradient /= rank.world_size


def seeds_all_ranks_alike(model: nn.Module, shard: Any, rank: Rank) -> None:
    torch.manual_seed(7)
    averages(model, shard, rank)


def seeds_all_gpus_alike(model: nn.Module, shard: Any, rank: Rank) -> None:
    torch.cuda.manual_seed(7)
    averages(model, shard, rank)


def does_not_wait(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= rank.world_size
        dist.all_reduce(parameter.grad, async_op=True)


def waits(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    handles = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= rank.world_size
        handles.append(dist.all_reduce(parameter.grad, async_op=True))
    for handle in handles:
        assert handle is not None
        handle.wait()


def synchronises(model: nn.Module, shard: Any, rank: Rank) -> None:
    does_not_wait(model, shard, rank)
    torch.cuda.synchronize()


class RoundsOnTheGpu(nn.Module):
    """On a GPU the products are rounded as those of another kernel might be."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.inner(rows)
        if rows.is_cuda:
            hidden = hidden.float().double()
        output: Tensor = self.outer(hidden.tanh())
        return output


def is_slightly_too_large(model: nn.Module, shard: Any, rank: Rank) -> None:
    averages(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 1.00001


def on_one_line(verdict: Verdict) -> str:
    return " ".join(verdict.full_report().split())


ONLY_MASKS = ("dropout_differs_from_reference",)


@pytest.fixture
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks drew cannot be given to the big batch, as with fused attention."""
    monkeypatch.setattr(analysis, "drawn_view", lambda *given: None)


@pytest.mark.parametrize(
    ("step", "model", "layout"),
    [
        (averages, with_dropout, "1x1"),
        (averages, CallsDropout, "1x2"),
        (trains_in_ddp, with_dropout, "1x2"),
    ],
)
def test_the_big_batch_with_the_masks_of_the_gpus_is_what_they_hold(
    step: Any, model: Any, layout: str
) -> None:
    verdict = check(case(model, layout), step)
    assert (verdict.outcome, verdict.causes) == ("same", ()), str(verdict)
    assert "the big batch is what they hold. Rank 0 drew at" in on_one_line(verdict)
    assert not verdict.again.masks_unpredictable


@pytest.mark.parametrize(
    ("step", "cause"),
    [(sums, "sum_not_mean"), (reduces_one_parameter, "parameter_not_reduced")],
)
def test_a_fault_is_named_with_the_masks_of_the_gpus(step: Any, cause: str) -> None:
    verdict = check(case(with_dropout), step)
    assert verdict.causes == (cause,), str(verdict)
    assert "the big batch still differs. Rank 0 drew at" in on_one_line(verdict)


@pytest.mark.usefixtures("no_numbers")
@pytest.mark.parametrize(("step", "layout"), [(averages, "1x1"), (trains_in_ddp, "1x2")])
def test_a_right_step_whose_masks_are_not_known_is_compared_without_them(
    step: Any, layout: str
) -> None:
    verdict = check(case(with_dropout, layout), step)
    assert (verdict.outcome, verdict.causes) == ("same", ()), str(verdict)
    assert "Without dropout: this is how the step was compared" in on_one_line(verdict)


@pytest.mark.usefixtures("no_numbers")
@pytest.mark.parametrize(
    ("step", "cause"),
    [(sums, "sum_not_mean"), (reduces_one_parameter, "parameter_not_reduced")],
)
def test_a_fault_beside_dropout_is_named_first(step: Any, cause: str) -> None:
    verdict = check(case(with_dropout), step)
    assert verdict.causes == (cause, *ONLY_MASKS), str(verdict)
    assert verdict.full_report().count("There are two causes") == 1


@pytest.mark.parametrize("step", [seeds_all_ranks_alike, seeds_all_gpus_alike])
def test_one_seed_on_all_ranks_is_seen(step: Any) -> None:
    verdict = check(case(with_dropout), step, allow_changes=True)
    assert verdict.causes == ("dropout_same_on_all_ranks",), str(verdict)
    assert "seeds every rank with 7" in verdict.full_report()


@pytest.mark.ddp(second_look=False)
def test_masks_excuse_nothing_where_the_step_may_not_run_again() -> None:
    verdict = check(case(with_dropout), sums)
    assert (verdict.outcome, verdict.causes) == ("different", ()), str(verdict)
    assert "Without dropout: the step was not judged" in on_one_line(verdict)


def test_a_result_that_comes_too_late_is_no_pass() -> None:
    verdict = check(case(without), does_not_wait)
    assert verdict.causes == ("collective_not_waited_for",), str(verdict)
    assert verdict.evidence[0].changed_later == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert "never waited for all_reduce of 96 elements at numbers_on_gpus.py:" in " ".join(
        verdict.full_report().split()
    )


@pytest.mark.parametrize("step", [waits, synchronises, trains_in_ddp])
def test_what_was_waited_for_is_the_same(step: Any) -> None:
    verdict = check(case(without), step)
    assert verdict.outcome == "same", str(verdict)


@pytest.mark.self_check
def test_limits_follow_the_rounding_of_the_ranks_device() -> None:
    """This needs tensors that know their device."""
    verdict = check(case(RoundsOnTheGpu), averages)
    assert verdict.outcome == "same", str(verdict)
    assert verdict.error is not None
    assert verdict.error > 1e-9
    assert "8 x the error of one device (cuda:0)" in verdict.full_report()
    larger = check(case(RoundsOnTheGpu), is_slightly_too_large)
    assert larger.outcome == "different", str(larger)


def test_randomness_is_not_taken_for_rounding() -> None:
    verdict = check(case(with_dropout), averages)
    assert verdict.unknown_because is not UnknownBecause.LIMIT_ABOVE_SIGNAL
    assert verdict.limit is not None
    assert verdict.limit < 1e-10
