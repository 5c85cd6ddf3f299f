"""A factor that is the number of ranks by chance does not get the name of one that ranks bring."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.report.blocks import Item, Shape
from ddp_equivalence.report.numbers import held
from ddp_equivalence.report.text import Line
from ddp_equivalence.report.verdict import Verdict
from tests.combinations import each_once
from tests.diagnosis.causes.named import first_finding
from tests.diagnosis.names.small_case import Loss, Step, average, case, checked, report_of
from tests.package.own_cases import loss as squares
from tests.package.pointed_at import faulty_lines, lines_shown

pytestmark = pytest.mark.self_check


def half_the_loss(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss = 0.5 * squares(ddp, shard)  # the factor
    loss.backward()


def twice_the_loss(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss = 2 * squares(ddp, shard)  # the factor
    loss.backward()


def marked(verdict: Verdict) -> list[str]:
    """The text of the lines that the report marks, of a difference without a name."""
    where = verdict.localisation.whereabouts
    assert where is not None
    faults = [one.line for one in where.lines if one.is_fault]
    return [linecache.getline(line.file, line.number) for line in faults]


@pytest.mark.parametrize(
    ("step", "factor"),
    [(half_the_loss, 0.5), (twice_the_loss, 2)],
)
def test_a_factor_that_one_rank_leaves_too_has_no_name_and_its_line_is_marked(
    step: Step, factor: float
) -> None:
    verdict = check(case(), step)
    assert verdict.outcome == "different"
    assert verdict.causes == (), verdict
    assert f"{factor:g} times" in report_of(verdict) or f"by {factor:g}" in report_of(verdict)
    assert "On one rank with the whole batch the step is wrong, too." in report_of(verdict)
    assert ["# the factor" in one for one in marked(verdict)] == [True], str(verdict)


def summed(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"], reduction="sum")


def half_of_a_sum(model: nn.Module, shard: Any, rank: Rank) -> None:
    (0.5 * summed(model, shard)).backward()
    average(model, 1)


def test_half_of_a_sum_is_not_called_an_average_over_two_ranks() -> None:
    verdict = check(case(loss=summed), half_of_a_sum)
    assert verdict.outcome == "different"
    assert verdict.causes == (), verdict


def loss_by_ranks(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (squares(ddp, shard) / rank.world_size).backward()


def gradients_by_ranks_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= rank.world_size
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(rank.world_size)


def sum_of_ranks(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, 1)


def mean_of_sums(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    summed(ddp, shard).backward()


FACTORS = [
    (loss_by_ranks, squares, "averaged_twice"),
    (gradients_by_ranks_twice, squares, "averaged_twice"),
    (sum_of_ranks, squares, "sum_not_mean"),
    (mean_of_sums, summed, "mean_not_sum"),
]


@pytest.mark.parametrize(("step", "loss", "cause", "layout"), each_once(FACTORS, ["1x2", "1x4"]))
def test_a_factor_that_comes_with_the_ranks_is_named(
    step: Step, loss: Loss, cause: str, layout: str
) -> None:
    verdict = check(case(layout, loss=loss), step)
    assert verdict.causes == (cause,), verdict
    assert len(faulty_lines(verdict)) == 1, str(verdict)
    assert "Fits every element." in report_of(verdict)


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (loss_by_ranks, "(squares(ddp, shard) / rank.world_size).backward()"),
        (gradients_by_ranks_twice, "parameter.grad.div_(rank.world_size)"),
    ],
)
def test_the_second_division_is_marked_and_called_an_average(step: Step, line: str) -> None:
    verdict = check(case("1x4"), step)
    assert faulty_lines(verdict) == [line], str(verdict)
    assert first_finding(verdict).headline == "gradients are divided once too often"


def buffer_by_ranks_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Nothing is seen of a division: it is not made on the gradients."""
    squares(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / rank.world_size**2, gradients)


@pytest.mark.parametrize("layout", ["1x2", "1x4"])
def test_a_second_division_that_was_not_seen_is_not_said_to_have_been(layout: str) -> None:
    verdict = check(case(layout), buffer_by_ranks_twice)
    ranks = layout[-1]
    assert verdict.causes == ("averaged_twice",), verdict
    assert faulty_lines(verdict) == [], str(verdict)
    assert lines_shown(verdict) == ["dist.all_reduce(flat)"]
    report = report_of(verdict)
    assert f"Gradients are {1 / int(ranks):g} times what they should be. A second" in report
    assert "division by the number of ranks explains this, but none was seen." in report
    assert "Fits the numbers; not seen happening." in " ".join(str(verdict).split())
    assert "divided once too often" not in report


@pytest.mark.parametrize("step", [half_the_loss, twice_the_loss])
def test_a_step_that_nobody_watched_is_not_run_on_one_rank(step: Step) -> None:
    verdict = checked(case(), step, second_look=False)
    assert verdict.outcome == "different"
    assert "On one rank" not in report_of(verdict)
    assert "divided once too often" not in report_of(verdict)


def divides_by_its_node(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, 2 * rank.local_world_size)


def scales(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= factor


def multiplies_by_its_number(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, rank.world_size)
    scales(model, rank.rank + 2)


def divides_by_what_was_set(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    steps = {0: 2, 1: 4, 2: 6, 3: 6}[rank.rank]
    average(model, steps)


def divides_on_the_first_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, rank.world_size)
    if rank.rank == 0:
        scales(model, 1 / 3)


MULTIPLIES = r"multiplies by [\d.]+ on rank 0; [\d.]+ on rank"
CHANGED = "right gradients are changed afterwards"


@pytest.mark.parametrize(
    ("step", "layout", "said"),
    [
        (divides_by_its_node, "1+3", MULTIPLIES),
        (divides_by_what_was_set, "1x4", MULTIPLIES),
        (multiplies_by_its_number, "1x2", CHANGED),
        (divides_on_the_first_rank, "1x2", CHANGED),
    ],
)
def test_each_rank_that_divides_by_a_number_of_its_own_is_told(
    step: Step, layout: str, said: str
) -> None:
    report = report_of(check(case(layout), step))
    assert "Fix: divide the gradients by" not in report
    assert "besides" not in report
    assert re.search(said, report), report


def weighs_some_ranks(weights: Sequence[float]) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        (squares(ddp, shard) * weights[rank.rank]).backward()

    return step


@pytest.mark.parametrize(
    ("weights", "who"),
    [
        ((1.0, 0.7, 0.7, 0.7), "ranks 1, 2 and 3"),
        ((0.7, 1.0, 0.7, 0.7), "ranks 0, 2 and 3"),
        ((1.0, 1.0, 1.3, 1.0), "rank 2"),
        ((1.0, 1.3, 1.0, 0.7), "ranks 1 and 3"),
        ((2.5, 0.7, 1.0, 1.0), "ranks 0 and 1"),
    ],
)
def test_a_wrong_factor_is_that_of_the_ranks_that_have_it_though_they_are_most(
    weights: Sequence[float], who: str
) -> None:
    report = report_of(check(case("1x4"), weighs_some_ranks(weights)))
    assert f"{who}: the loss has a wrong factor" in report, report


def lines_of(item: Item | Line) -> Sequence[Line]:
    """What stands in place of a table where there is no room for one."""
    return [item] if isinstance(item, Line) else item.lines(Shape(rows=0))


def whole_loss_and_mean(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The losses already add up to that of the big batch, so that their gradients do, too."""
    value = torch.autograd.grad(squares(model, shard), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), value, strict=True):
        total = gradient.clone()
        dist.all_reduce(total)
        parameter.grad = total * (1 / rank.world_size**2)


def test_a_division_too_many_that_was_not_seen_is_not_put_down_to_ddp() -> None:
    verdict = check(case("1x4"), whole_loss_and_mean)
    assert "not seen happening" in report_of(verdict), verdict
    assert "Fix: leave out a division by 4, or multiply the gradients by 4." in report_of(verdict)
    said = [line.text for one in held(verdict) for line in lines_of(one)]
    assert not any(
        "times what the big batch gives" in text for text in said
    )  # the headline says so


def summed_over(divisor: int, bucket: Any) -> Any:
    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0] / divisor)


def own_counts_and_ranks_of_a_node(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    # torch reads the annotation of "bucket", which is text in this file
    ddp.register_comm_hook(rank.local_world_size, lambda size, bucket: summed_over(size, bucket))
    masked(ddp, shard).backward()


def masked(model: nn.Module, batch: Any) -> Any:
    errors = (model(batch["rows"]) - batch["targets"]).square()
    weights = (batch["rows"].sum(1, keepdim=True) > -1).to(errors.dtype)
    return (errors * weights).sum() / weights.sum()


def test_of_two_causes_only_that_without_a_common_factor_is_called_a_multiple() -> None:
    verdict = check(case("2x2", loss=masked), own_counts_and_ranks_of_a_node)
    assert verdict.causes == ("token_counts_weighted_equally", "divided_by_local_world_size")
    text = report_of(verdict)
    assert "times what they should be" not in text
    assert text.count("Fix: ") == 1  # after the first fix no factor is left
    assert "and add the ranks' gradients up." in text


def test_a_gradient_that_is_zero_up_to_rounding_does_not_speak_against_a_sum() -> None:
    """The scale of all outputs drops out of a contrastive loss of normalised ones."""
    subject = Case(
        model="odd_shapes", loss="contrastive", layout="3x1", shards="empty", examples=26
    )
    verdict = check(replace(subject, seed=95021, examples=26), "ddp_sum_hook")
    assert verdict.cause == "sum_not_mean", verdict
