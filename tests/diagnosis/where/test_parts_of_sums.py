"""Where ranks compute with sums of their own parts, the lines that make these are shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ddp_equivalence import check
from tests.diagnosis.where.faulty import CASE, average, loss, marked_line, unnamed, where

pytestmark = pytest.mark.self_check


def product_of_means(model: Any, batch: Any) -> Any:
    outputs = model(batch["rows"])
    return balance(outputs, outputs.softmax(1).mean(0))


def balance(outputs: Tensor, share: Tensor) -> Tensor:
    return (share * outputs.mean(0)).sum()


def own_share(model: Any, shard: Any, rank: Any) -> None:
    outputs = model(shard["rows"])
    likely = outputs.softmax(1)
    share = likely.mean(0)  # fault
    balance(outputs, share).backward()
    average(model)


def scaled(model: Any, batch: Any) -> Any:
    outputs = model(batch["rows"])
    return outputs.square().mean() / outputs.detach().var()


def mean_of_own_variances(model: Any, shard: Any, rank: Any) -> None:
    outputs = model(shard["rows"])
    values = outputs.detach().clone()
    spread = values.var()  # fault
    dist.all_reduce(spread)
    spread /= rank.world_size
    (outputs.square().mean() / spread).backward()
    average(model)


def rounded(model: Any, shard: Any, rank: Any) -> None:
    """A rank that is wrong, in gradients that all ranks round before they are reduced."""
    (loss(model, shard) * (1 + 0.3 * rank.rank / rank.world_size)).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)
    average(model)


def test_the_line_that_makes_a_rank_s_own_part_is_shown_beside_that_which_reads_it() -> None:
    found = unnamed(replace(CASE, loss=product_of_means), own_share)
    notes = {one.line.number: one.note for one in found.lines}
    what = "share is each rank's own, and one rank has the mean"
    assert notes.get(marked_line(own_share)) == what


def test_no_line_is_shown_behind_one_that_was_given_right_values() -> None:
    found = unnamed(replace(CASE, loss=scaled), mean_of_own_variances)
    faults = [one.line.number for one in found.lines if one.is_fault]
    assert faults == [marked_line(mean_of_own_variances)]
    assert not any("which line" in one.note for one in found.lines), found.lines


def test_a_step_that_rounds_is_right_on_one_rank_up_to_this_rounding() -> None:
    found = unnamed(CASE, rounded)
    assert found.beside_one_rank.endswith("the step is right, up to rounding in bfloat16.")


# What every rank has whole, added to each rank's part of a sum, counts once for each rank.


def penalty(model: Any) -> Any:
    return 0.3 * model.middle.weight.square().sum()


def summed_with_penalty(model: Any, batch: Any) -> Any:
    return (model(batch["rows"]) - batch["targets"]).square().sum() / 16 + penalty(model)


def penalty_on_every_rank(model: Any, shard: Any, rank: Any) -> None:
    fit = (model(shard["rows"]) - shard["targets"]).square().sum() / 16
    value = fit + penalty(model)  # fault
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def test_what_every_rank_adds_whole_to_its_part_of_a_sum_is_told() -> None:
    found = unnamed(replace(CASE, loss=summed_with_penalty), penalty_on_every_rank)
    line = marked_line(penalty_on_every_rank)
    what = f"Line {line} adds what every rank has whole to the rank's own part of a sum"
    assert found.sentence.startswith(what), found.sentence
    assert [one.line.number for one in found.lines if one.is_fault] == [line]


# A loss that joins examples gives the rows of a rank alone another loss than among all others.


def centred(model: Any, batch: Any, centre: Any = None) -> Any:
    outputs = model(batch["rows"])
    centre = outputs.mean(0) if centre is None else centre
    return (outputs - centre).square().mean() + outputs.mean().square()


def another_centre_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    outputs = model(shard["rows"])
    centre = outputs.mean(0).detach() * (1 + rank.rank)  # fault
    dist.all_reduce(centre)
    centred(model, shard, centre / rank.world_size).backward()
    for name, parameter in model.named_parameters():
        if name != "head.bias":
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


def test_the_loss_of_rows_alone_is_no_measure_where_they_have_another_one_among_others() -> None:
    verdict = check(replace(CASE, loss=centred, layout="1x2"), another_centre_on_one_rank)
    text = " ".join(str(verdict).split())
    assert "its own rows give" not in text
    assert "rows give" not in text.partition("[")[0]


def own_means(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    average(model)


def own_means_times_eight(model: Any, shard: Any, rank: Any) -> None:
    (8 * loss(model, shard)).backward()
    average(model)


def test_a_fix_of_divisors_undoes_the_average_and_leaves_another_factor_alone() -> None:
    uneven = replace(CASE, shards="5+3+6+2")
    found = where(uneven, own_means)
    assert found.fix == (
        "divide each summed loss by the count of the whole batch, and multiply it by 4."
    )
    found = where(uneven, own_means_times_eight)
    assert found.fix == ""
    assert ", times 8, 8, 8, 8, and they are averaged" in found.sentence
