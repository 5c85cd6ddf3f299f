"""Counts of windows, of other things than the big batch counts, and factors that remain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.case import settings
from ddp_equivalence.report.verdict import Verdict
from tests.diagnosis.causes.named import first_finding
from tests.diagnosis.names.small_case import Step, average, case, report_of
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check

EXAMPLES, TOKENS = 16, 6
VALID = 46
"""The labels that are not padding."""


def padded(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(0, 3, (EXAMPLES, TOKENS), generator=generator)
    for row in range(EXAMPLES):
        labels[row, 1 + (row * 7) % 5 :] = -100
    return {"rows": torch.randn(EXAMPLES, TOKENS, 5, generator=generator), "labels": labels}


def of_tokens(model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    outputs, labels = model(batch["rows"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(outputs, labels, reduction=reduction)


def tokens(layout: str = "1x2") -> Case:
    return case(layout, batch=padded, loss=of_tokens)


def cut(batch: Any, count: int) -> list[dict[str, Tensor]]:
    chunks = {name: leaf.chunk(count) for name, leaf in batch.items()}
    return [{name: parts[number] for name, parts in chunks.items()} for number in range(count)]


def valid(batch: Any) -> Any:
    return (batch["labels"] != -100).sum()


def named(case: Case, step: Step) -> Verdict:
    """The verdict on a step that differs; no edit of it is tried."""
    with settings.using(settings.replaced(trial_seconds=0)):
        verdict = check(case, step)
    assert verdict.outcome == "different", verdict
    return verdict


def rivals(verdict: Verdict) -> list[str]:
    return [one.cause for one in verdict.findings if one.accepted]


def mean_of_the_window(count: int) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        for part in cut(shard, count):
            (of_tokens(model, part, "sum") / valid(shard)).backward()
        average(model, rank.world_size)

    return step


def mean_over_all_ranks(model: nn.Module, shard: Any, rank: Rank) -> None:
    for part in cut(shard, 4):
        everywhere = valid(part).double()
        dist.all_reduce(everywhere)
        (rank.world_size * of_tokens(model, part, "sum") / everywhere / 4).backward()
    average(model, rank.world_size)


@pytest.mark.parametrize(
    ("step", "counts"),
    [
        (mean_of_the_window(4), (24, 22)),
        (mean_over_all_ranks, (10, 11, 12, 13)),
    ],
    ids=["of_a_window", "over_all_ranks"],
)
def test_means_over_windows_are_named_with_their_own_counts(
    step: Step, counts: tuple[int, ...]
) -> None:
    verdict = named(tokens(), step)
    assert rivals(verdict) == ["token_counts_weighted_equally"], verdict
    assert f"{', '.join(map(str, counts))})" in first_finding(verdict).detail


def means_of_micro_batches(model: nn.Module, shard: Any, rank: Rank) -> None:
    for part in cut(shard, 4):
        (of_tokens(model, part) / 4).backward()


def test_on_one_rank_nothing_is_said_of_ranks() -> None:
    finding = first_finding(named(tokens("1x1"), means_of_micro_batches))
    assert finding.cause == "token_counts_weighted_equally"
    assert finding.fix == "divide each micro-batch's summed loss by the count of the whole window."
    assert "rank" not in finding.sentence + finding.headline


def by_all_labels(model: nn.Module, shard: Any, rank: Rank) -> None:
    (of_tokens(model, shard, "sum") / shard["labels"].numel()).backward()
    average(model, rank.world_size)


def by_labels_of_the_rank_after_the_first(model: nn.Module, shard: Any, rank: Rank) -> None:
    (of_tokens(model, shard, "sum") / valid({"labels": shard["labels"][:, 1:]})).backward()
    average(model, rank.world_size)


def by_four_times_the_last(model: nn.Module, shard: Any, rank: Rank) -> None:
    parts = cut(shard, 4)
    for part in parts:
        (of_tokens(model, part, "sum") / (4 * valid(parts[-1]))).backward()
    average(model, rank.world_size)


@pytest.mark.parametrize(
    ("step", "detail"),
    [
        (by_all_labels, f"by {EXAMPLES * TOKENS}, elements of labels, instead of {VALID}, "),
        (by_labels_of_the_rank_after_the_first, "divided by 16, 14 (by rank), "),
        (by_four_times_the_last, "last micro-batch, times 4 micro-batches, instead of 46, "),
    ],
)
def test_another_count_is_named_with_both_counts(step: Step, detail: str) -> None:
    verdict = named(tokens(), step)
    assert rivals(verdict) == ["divided_by_another_count"], verdict
    assert detail in first_finding(verdict).detail
    assert f"{VALID}, the targets that are not -100" in first_finding(verdict).detail


def by_a_number(model: nn.Module, shard: Any, rank: Rank) -> None:
    """3 is also the number of targets of an example."""
    (3 * squares(model, shard)).backward()
    average(model, rank.world_size)


def by_examples(model: nn.Module, shard: Any, rank: Rank) -> None:
    total = F.mse_loss(model(shard["rows"]), shard["targets"], reduction="sum")
    loss = total / len(shard["rows"])
    loss.backward()
    average(model, rank.world_size)


def test_a_number_that_may_be_written_down_is_no_count_unless_a_division_was_seen() -> None:
    assert rivals(named(case(), by_a_number)) == []
    verdict = named(case(), by_examples)
    assert rivals(verdict) == ["divided_by_another_count"], verdict
    assert "a division by 6, the part of one rank, was seen" in report_of(verdict)


def nine_tenths(model: nn.Module, shard: Any, rank: Rank) -> None:
    for part in cut(shard, 3):
        (0.9 * squares(model, part) / 3).backward()


def twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (2 * squares(ddp, shard)).backward()


@pytest.mark.parametrize(("layout", "step"), [("1x1", nine_tenths), ("2x2", twice)])
def test_a_factor_that_somebody_wrote_has_no_name(layout: str, step: Step) -> None:
    assert rivals(named(case(layout), step)) == []


def of_waves(model: nn.Module, batch: Any) -> Tensor:
    """The rows that the model reads are not recognised."""
    return F.mse_loss(model(batch["rows"].sin().cumsum(1)), batch["targets"])


def adds_two_micro_batches(model: nn.Module, shard: Any, rank: Rank) -> None:
    for part in cut(shard, 2):
        of_waves(model, part).backward()
    average(model, rank.world_size)


def test_unknown_micro_batches_are_not_one() -> None:
    """Nobody knows whether the second backward read the same examples."""
    verdict = named(case(loss=of_waves), adds_two_micro_batches)
    assert rivals(verdict) == ["accumulation_not_divided", "stale_gradient_added"], verdict


def not_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    (0.94 * squares(model, shard)).backward()


def summed(model: nn.Module, shard: Any, rank: Rank) -> None:
    (0.94 * squares(model, shard)).backward()
    average(model, 1)


def averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (0.94 * squares(ddp, shard)).backward()


@pytest.mark.parametrize(
    ("case", "step", "cause"),
    [
        (case(), not_reduced, "no_all_reduce"),
        (case(), summed, "sum_not_mean"),
        (case(shards="8+4"), averaged, "uneven_shards_weighted_equally"),
    ],
    ids=["not_reduced", "summed", "averaged"],
)
def test_a_factor_that_remains_is_told(case: Case, step: Step, cause: str) -> None:
    verdict = named(case, step)
    assert verdict.causes == (cause,), verdict
    assert "0.94 times besides" in " ".join(str(verdict).split())


def sum_over_a_wrong_count(model: nn.Module, shard: Any, rank: Rank) -> None:
    """0.42 times each rank's mean, of which two are added up: 0.84 times the right gradient."""
    (0.42 * squares(model, shard)).backward()
    average(model, 1)


def test_a_sum_is_not_wrong_where_the_sum_is_nearly_right() -> None:
    assert rivals(named(case(), sum_over_a_wrong_count)) == []
