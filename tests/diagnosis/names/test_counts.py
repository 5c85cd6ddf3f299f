"""Means over different counts are named where a count of the batch explains the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.combinations import each_once
from tests.diagnosis.names.small_case import Loss, average, by_hand, case, report_of, under_ddp
from tests.package.own_cases import EXAMPLES, make_batch
from tests.package.pointed_at import faulty_lines

pytestmark = pytest.mark.self_check

TOKENS = 6


def with_labels(generator: torch.Generator, padding: int) -> dict[str, Tensor]:
    labels = torch.randint(1, 3, (EXAMPLES, TOKENS), generator=generator)
    for row in range(EXAMPLES):
        labels[row, 1 + row % 4 + row // 6 :] = padding
    return {"rows": torch.randn(EXAMPLES, TOKENS, 5, generator=generator), "labels": labels}


def padded(generator: torch.Generator) -> dict[str, Tensor]:
    return with_labels(generator, -100)


def without_tokens_in_the_second_half(generator: torch.Generator) -> dict[str, Tensor]:
    batch = padded(generator)
    batch["labels"][EXAMPLES // 2 :] = -100
    return batch


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["rows"]).flatten(0, 1), batch["labels"].flatten())


def safe_token_mean(model: nn.Module, batch: Any) -> Any:
    outputs, labels = model(batch["rows"]).flatten(0, 1), batch["labels"].flatten()
    total = F.cross_entropy(outputs, labels, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def with_weights(generator: torch.Generator) -> dict[str, Tensor]:
    return make_batch(generator) | {"weight": torch.rand(EXAMPLES, generator=generator)}


def weighted_mean(model: nn.Module, batch: Any) -> Any:
    errors = (model(batch["rows"]) - batch["targets"]).square().mean(1)
    return (errors * batch["weight"]).sum() / batch["weight"].sum()


def with_classes(generator: torch.Generator) -> dict[str, Tensor]:
    classes = torch.tensor([0, 0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1])
    return make_batch(generator) | {"classes": classes}


def mean_of_positives(model: nn.Module, batch: Any) -> Any:
    positive = batch["classes"] > 0
    errors = (model(batch["rows"]) - batch["targets"]).square().mean(1)
    return errors[positive].sum() / positive.sum()


def weighted_cross_entropy(model: nn.Module, batch: Any) -> Any:
    weight = torch.tensor([1.0, 5.0, 24.0], dtype=batch["rows"].dtype) / 3
    return F.cross_entropy(model(batch["rows"]), batch["classes"], weight=weight)


def weighted_by_place(model: nn.Module, batch: Any) -> Any:
    """The classes have no weights of their own: it is the rows that have."""
    weight = batch["rows"][:, 0].abs()
    errors = F.cross_entropy(model(batch["rows"]), batch["classes"], reduction="none")
    return (errors * weight).sum() / weight.sum()


def with_zeros(generator: torch.Generator) -> dict[str, Tensor]:
    return with_labels(generator, 0)


def next_token_mean(model: nn.Module, batch: Any) -> Any:
    """As language models have it: the target of a token is the next one of its row."""
    outputs, targets = model(batch["rows"])[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=0)


def next_token_nll(model: nn.Module, batch: Any) -> Any:
    outputs, targets = model(batch["rows"])[:, :-1].log_softmax(-1), batch["labels"][:, 1:]
    return F.nll_loss(outputs.flatten(0, 1), targets.flatten(), ignore_index=0)


def masked_tokens(model: nn.Module, batch: Any) -> Any:
    targets = batch["labels"][:, 1:]
    keep = (targets != 0).to(batch["rows"].dtype)
    outputs = model(batch["rows"])[:, :-1].transpose(1, 2)
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (losses * keep).sum() / keep.sum()


def selected_tokens(model: nn.Module, batch: Any) -> Any:
    keep = batch["labels"][:, 1:] != 0
    outputs = model(batch["rows"])[:, :-1][keep]
    return F.cross_entropy(outputs, batch["labels"][:, 1:][keep])


def mean_of_selected(model: nn.Module, batch: Any) -> Any:
    keep = batch["labels"][:, 1:] != 0
    return model(batch["rows"])[:, :-1][keep].square().mean()


def smoothed_tokens(model: nn.Module, batch: Any) -> Any:
    outputs, targets = model(batch["rows"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(outputs, targets, label_smoothing=0.1, ignore_index=0)


def weighted_and_smoothed(model: nn.Module, batch: Any) -> Any:
    weight = torch.tensor([1.0, 5.0, 24.0], dtype=batch["rows"].dtype) / 3
    outputs = model(batch["rows"])
    return F.cross_entropy(outputs, batch["classes"], weight=weight, label_smoothing=0.1)


def times_one_over_a_count(model: nn.Module, batch: Any) -> Any:
    """Its divisor is a number of Python."""
    count = int((batch["labels"][:, :2] == 1).sum())
    return model(batch["rows"])[:, :2][batch["labels"][:, :2] == 1].square().sum() * (1 / count)


COUNTED: list[tuple[Any, Loss, str]] = [
    (padded, token_mean, "the targets that are not -100"),
    (without_tokens_in_the_second_half, safe_token_mean, "elements of labels that are not -100"),
    (with_weights, weighted_mean, "batch['weight'].sum()"),
    (with_classes, mean_of_positives, "positive.sum()"),
    (with_classes, weighted_cross_entropy, "the weights of the targets' classes"),
    (with_zeros, next_token_mean, "the targets that are not 0"),
    (with_zeros, next_token_nll, "the targets that are not 0"),
    (with_zeros, masked_tokens, "keep.sum()"),
    (with_zeros, selected_tokens, "the targets"),
    (with_zeros, mean_of_selected, "the elements that it takes the mean of"),
    (with_zeros, smoothed_tokens, "a count of its own"),
    (with_classes, weighted_and_smoothed, "a count of its own"),
    (with_zeros, times_one_over_a_count, "a count of its own"),
]


@pytest.mark.parametrize(
    ("batch", "loss", "unit", "reduced", "layout"),
    each_once(
        COUNTED, [(by_hand, "1x2"), (under_ddp, "1x4"), (by_hand, "1x4"), (under_ddp, "1x2")]
    ),
)
def test_the_count_that_a_loss_divides_by_is_named(
    batch: Any, loss: Loss, unit: str, reduced: Any, layout: str
) -> None:
    verdict = check(case(layout, batch=batch, loss=loss), reduced(loss))
    assert verdict.causes == ("token_counts_weighted_equally",), verdict
    assert f"the loss divides by {unit}" in report_of(verdict)


def two_terms(model: nn.Module, batch: Any) -> Any:
    return next_token_mean(model, batch) + 0.5 * mean_of_first(model, batch)


def mean_of_first(model: nn.Module, batch: Any) -> Any:
    first = batch["labels"][:, 1] != 0
    return F.mse_loss(model(batch["rows"])[first, 0, 0], batch["rows"][first, 0, 0])


def difference_of_terms(model: nn.Module, batch: Any) -> Any:
    return next_token_mean(model, batch) - mean_of_first(model, batch) / 4


def with_a_mean_over_examples(model: nn.Module, batch: Any) -> Any:
    return next_token_nll(model, batch) + model(batch["rows"]).square().mean()


def with_weight_decay(model: nn.Module, batch: Any) -> Any:
    decay = sum(one.square().sum() for one in model.parameters())
    return masked_tokens(model, batch) + 0.01 * decay


def mean_of_three(model: nn.Module, batch: Any) -> Any:
    losses = [next_token_mean(model, batch), mean_of_first(model, batch)]
    return sum([*losses, model(batch["rows"]).abs().mean()]) / 3


def with_a_spread(model: nn.Module, batch: Any) -> Any:
    """One term is no mean over examples."""
    return next_token_mean(model, batch) + model(batch["rows"])[:, 0].std(0).mean()


TOKENS_ALONE, FIRST = (
    "the targets that are not 0 (by rank: ",
    "the elements that it takes the mean of",
)
IN_TERMS: list[tuple[Loss, tuple[str, ...]]] = [
    (two_terms, ("2 terms", TOKENS_ALONE, FIRST)),
    (difference_of_terms, ("2 terms", TOKENS_ALONE, FIRST)),
    (with_a_mean_over_examples, ("2 terms", TOKENS_ALONE, "by examples (by rank: 6, 6)")),
    (with_weight_decay, ("the loss divides by keep.sum() (by rank: ",)),
    (mean_of_three, ("3 terms", TOKENS_ALONE, FIRST, "by examples (by rank: 6, 6)")),
]


@pytest.mark.parametrize(("loss", "texts"), IN_TERMS)
def test_every_term_of_a_loss_has_its_own_count(loss: Loss, texts: tuple[str, ...]) -> None:
    verdict = check(case(batch=with_zeros, loss=loss), under_ddp(loss))
    assert verdict.causes == ("token_counts_weighted_equally",), verdict
    report = report_of(verdict)
    assert all(text in report for text in texts), report


def by_rows(model: nn.Module, shard: Any, rank: Any) -> None:
    weight = torch.tensor([1.0, 5.0, 24.0], dtype=shard["rows"].dtype) / 3
    outputs = model(shard["rows"])
    total = F.cross_entropy(outputs, shard["classes"], weight=weight, reduction="sum")
    (total * rank.world_size / EXAMPLES).backward()
    average(model, rank.world_size)


def test_another_divisor_than_the_weights_of_classes_is_named_with_both() -> None:
    verdict = check(case(batch=with_classes, loss=weighted_cross_entropy), by_rows)
    assert verdict.cause == "divided_by_another_count", verdict
    assert "by 12, examples, instead of 32.3333, the weights of the targets' classes" in report_of(
        verdict
    )


def by_the_largest_count(model: nn.Module, shard: Any, rank: Any) -> None:
    """Each rank divides by 18. Two times this is the number of targets, by coincidence."""
    total = F.mse_loss(model(shard["rows"])[:, 0], shard["rows"][:, 0], reduction="sum")
    count = torch.tensor(18 - rank.rank)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    value = total / count
    value.backward()
    average(model, rank.world_size)


def of_one_column(model: nn.Module, examples: Any) -> Tensor:
    return F.mse_loss(model(examples["rows"])[:, 0], examples["rows"][:, 0])


def test_what_each_of_several_ranks_divides_by_is_not_said_to_count_anything() -> None:
    verdict = check(case(batch=with_classes, loss=of_one_column), by_the_largest_count)
    report = " ".join(report_of(verdict).split())
    assert "divided by 18 on each rank, instead of 6; in all there are 12, the elements" in report
    assert "Fix: divide by 12 / 2 (the elements that it takes the mean of), not by 18." in report


def with_two_masks(generator: torch.Generator) -> dict[str, Tensor]:
    rows = torch.arange(EXAMPLES)
    return make_batch(generator) | {"real": rows % 4 != 3, "bonds": rows % 3 != 2}


def summed_over_real(model: nn.Module, batch: Any) -> Any:
    return (model(batch["rows"]).square().sum(1) * batch["real"]).sum()


def mean_over_real(model: nn.Module, batch: Any) -> Any:
    return summed_over_real(model, batch) / batch["real"].sum()


def half_of_an_odd_count(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp, count = DistributedDataParallel(model), shard["real"].sum()
    dist.all_reduce(count)
    (summed_over_real(ddp, shard) / (count // rank.world_size)).backward()


def test_what_counts_as_many_by_chance_is_not_said_to_be_divided_by() -> None:
    verdict = check(case(batch=with_two_masks, loss=mean_over_real), half_of_an_odd_count)
    assert verdict.cause == "divided_by_another_count", verdict
    report = " ".join(report_of(verdict).split())
    assert "Namely: as if divided by 8, elements of bonds that are set, instead of 9, " in report


def test_a_term_that_is_no_mean_is_not_said_to_have_a_count() -> None:
    verdict = check(case(batch=with_zeros, loss=with_a_spread), under_ddp(with_a_spread))
    assert verdict.outcome == "different"
    assert "token_counts_weighted_equally" not in verdict.causes


def test_weights_of_classes_are_summed_in_the_fix() -> None:
    verdict = check(
        case(batch=with_classes, loss=weighted_cross_entropy), under_ddp(weighted_cross_entropy)
    )
    fix = "Fix: divide the summed loss by the sum of the weights of all ranks, and multiply it by 2"
    assert fix in report_of(verdict)


@pytest.mark.parametrize("layout", ["1x2", "1x4"])
def test_weights_of_rows_are_not_taken_for_those_of_classes(layout: str) -> None:
    loss = weighted_by_place
    verdict = check(case(layout, batch=with_classes, loss=loss), under_ddp(loss))
    assert verdict.outcome == "different"
    assert "of the classes" not in report_of(verdict)


def counts_first_tokens_too(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The labels of all ranks are counted before they are shifted."""
    count = (shard["labels"] != 0).sum()
    dist.all_reduce(count)
    outputs = model(shard["rows"])[:, :-1].flatten(0, 1)
    total = F.cross_entropy(
        outputs, shard["labels"][:, 1:].flatten(), reduction="sum", ignore_index=0
    )
    (total / count).backward()
    average(model, 1)


def counts_rows_and_padding(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every place counts, whether it is padding or not."""
    targets = shard["labels"][:, 1:].flatten()
    count = torch.ones_like(targets).sum()
    dist.all_reduce(count)
    outputs = model(shard["rows"])[:, :-1].flatten(0, 1)
    total = F.cross_entropy(outputs, targets, reduction="sum", ignore_index=0)
    (total / count).backward()
    average(model, 1)


def counts_what_it_sums_up(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 counts the tokens of the second class twice, and so do all others."""
    targets = shard["labels"][:, 1:].flatten()
    count = (targets * (targets > 0)).sum()
    dist.all_reduce(count)
    outputs = model(shard["rows"])[:, :-1].flatten(0, 1)
    total = F.cross_entropy(outputs, targets, reduction="sum", ignore_index=0)
    (total / count).backward()
    average(model, 1)


def counts_places_of_its_own(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Under DDP each rank divides by its own places, of which all have equally many."""
    ddp = DistributedDataParallel(model)
    targets = shard["labels"][:, 1:].flatten()
    count = torch.ones_like(targets).sum()
    outputs = ddp(shard["rows"])[:, :-1].flatten(0, 1)
    total = F.cross_entropy(outputs, targets, reduction="sum", ignore_index=0)
    (total / count).backward()


def test_a_number_of_one_rank_is_no_fix_where_ranks_divide_by_their_own() -> None:
    verdict = check(case(batch=with_zeros, loss=next_token_mean), counts_places_of_its_own)
    report = report_of(verdict)
    assert "on one rank divided by 60, instead of 24, the targets that are not 0" in report
    assert "Fix: count the targets that are not 0 in the marked line." in report


COUNTING = [counts_first_tokens_too, counts_rows_and_padding, counts_what_it_sums_up]


@pytest.mark.parametrize("step", COUNTING)
def test_the_line_that_makes_a_wrong_count_is_marked_and_not_the_loss(step: Any) -> None:
    verdict = check(case(batch=with_zeros, loss=next_token_mean), step)
    assert verdict.cause == "divided_by_another_count", verdict
    assert [one.split("=")[0].strip() for one in faulty_lines(verdict)] == ["count"], verdict
