"""Where gradients go wrong: on the ranks themselves, in the reduction, or by what the big batch
divides otherwise. The kind, the ranks and the line are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from tests.diagnosis.where.faulty import (
    CASE,
    NEAR,
    Small,
    average,
    batch,
    distance,
    loss,
    marked_line,
    where,
)

# The ranks' own gradients are right and reduced wrongly.


def maximum_instead_of_sum(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)  # fault


def rank_returns_early(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad /= rank.world_size
    group = dist.new_group([0, 1, 2])
    if rank.rank == 3:
        return  # fault
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)


def reduced_to_one_rank(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad /= rank.world_size
        dist.reduce(parameter.grad, 0)  # fault


def broadcast_before_it_is_reduced(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    dist.broadcast(model.head.bias.grad, 0)  # fault
    average(model)


def passes_of_one_rank_alone_count_twice(model: Any, shard: Any, rank: Any) -> None:
    """As in DDP's ``join``: rank 0 has three passes, and rank 1 has one."""
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for number in range(3):
        rows = {name: leaf[4 * number : 4 * number + 4] for name, leaf in shard.items()}
        if len(rows["rows"]):
            (loss(model, rows) / 4).backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            total += gradient if number == 0 else 2 * gradient
            parameter.grad = None
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = total  # fault


def wrong_modulo_of_no_sync(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(4):
        part = {name: value[number : number + 1] for name, value in shard.items()}
        if number % 3 == 2:  # fault
            (loss(ddp, part) / 4).backward()
        else:
            with ddp.no_sync():
                (loss(ddp, part) / 4).backward()


def weights_of_ranks(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad *= (rank.rank + 1) / 10  # fault
        dist.all_reduce(parameter.grad)


def cleared_between_micro_batches(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        model.zero_grad()  # fault
        (loss(model, part) / 2).backward()
    average(model)


def tail_hook_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    if rank.rank == 2:
        model.head.weight.register_hook(lambda gradient: 3 * gradient)  # fault
    loss(model, shard).backward()
    average(model)


def tail_not_reduced(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    aligned = len(flat) // 13 * 13  # fault
    dist.all_reduce(flat[:aligned])
    flat[:aligned] /= rank.world_size
    _give_back(model, flat)


def tail_stays_zero(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    aligned = len(flat) // 13 * 13  # fault
    total, begin = torch.zeros_like(flat), flat[:aligned].clone()
    dist.all_reduce(begin)
    total[:aligned] = begin / rank.world_size
    _give_back(model, total)


def _give_back(model: Any, flat: Any) -> None:
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)


def shrinks_what_is_there(model: Any, shard: Any, rank: Any) -> None:
    """The gradients of the first half are divided by 2000 before the second half is added."""
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        (loss(model, {"rows": rows, "targets": targets}) / 2 * 2000).backward()
        for parameter in model.parameters():
            parameter.grad /= 2000
    average(model)


# A rank's own gradient is not what its rows give.


def labels_shifted_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    targets = shard["targets"]
    if rank.rank == 1:
        targets = targets.roll(1, 0)  # fault
    output = ddp(shard["rows"])
    F.mse_loss(output, targets).backward()


def detached_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    hidden = torch.tanh(model.norm(hidden))
    if rank.rank == 1:
        hidden = hidden.detach() + 0 * hidden  # fault
    output = model.head(torch.tanh(model.middle(hidden)))
    value = F.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


def gradient_hook_on_a_module(model: Any, shard: Any, rank: Any) -> None:
    if rank.rank == 0:
        model.middle.register_full_backward_hook(lambda _, given, out: (2 * given[0],))  # fault
    value = loss(model, shard)
    value.backward()
    average(model)


def targets_of_the_second_micro_batch(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        rows = shard["rows"][2 * number : 2 * number + 2]
        targets = shard["targets"][:2]  # fault
        value = F.mse_loss(model(rows), targets) / 2
        value.backward()
    average(model)


def module_skipped_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    if rank.rank != 1:
        hidden = model.norm(hidden)  # fault
    output = model.head(torch.tanh(model.middle(torch.tanh(hidden))))
    F.mse_loss(output, shard["targets"]).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average(model)


# Both are right, and the big batch divides otherwise; or a term of the loss counts otherwise.


def token_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows with different numbers of targets that count."""
    examples = batch(generator)
    counts = torch.arange(16) * 7 % 3 + 1
    examples["mask"] = (torch.arange(3) < counts[:, None]).long()
    return examples


def token_loss(model: Any, examples: dict[str, Tensor]) -> Any:
    square = (model(examples["rows"]) - examples["targets"]).square()
    return (square * examples["mask"]).sum() / examples["mask"].sum()


def pair_loss(model: Any, examples: dict[str, Tensor]) -> Any:
    scores = model(examples["rows"])
    return F.softplus(scores[1::2] - scores[0::2]).mean()


def pairs_dealt_apart(model: Any, whole: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    own = {name: value[rank.rank :: rank.world_size] for name, value in whole.items()}  # fault
    pair_loss(ddp, own).backward()


def micro_batch_means(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(4):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        value = token_loss(ddp, part) / 4  # fault
        value.backward()


def micro_batch_means_by_hand(model: Any, shard: Any, rank: Any) -> None:
    for begin, end in ((0, 5), (5, 8)):
        part = {name: value[begin:end] for name, value in shard.items()}
        (loss(model, part) / 2).backward()  # fault
    average(model)


def one_micro_batch_counts_twice(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        value = loss(model, part) / (2 - number)  # fault
        value.backward()
    average(model)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.value = nn.Linear(8, 3)
        self.policy = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(rows))
        return self.value(hidden), self.policy(hidden)


def terms_of(model: Any, examples: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    value, policy = model(examples["rows"])
    labels = examples["targets"].argmax(1)
    return F.mse_loss(value, examples["targets"]), F.cross_entropy(policy, labels)


def both(model: Any, examples: dict[str, Tensor]) -> Tensor:
    first, second = terms_of(model, examples)
    return first + 0.5 * second


def scales_one_term(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    first, second = terms_of(ddp, shard)
    second = second / dist.get_world_size()  # fault
    total = first + 0.5 * second
    total.backward()


def reduces_one_head_twice(model: Any, shard: Any, rank: Any) -> None:
    both(model, shard).backward()
    average(model)
    for parameter in model.policy.parameters():
        parameter.grad *= 0.25


EVERY = (0, 1, 2, 3)
TWO = replace(CASE, layout="1x2")
UNEVEN = replace(CASE, layout="1x2", shards="12+4")
TOKENS = Case(model=Small, batch=token_batch, loss=token_loss, layout="1x2")
PAIRS = Case(model=Small, batch=batch, loss=pair_loss, layout="1x2", shards="own")
TWO_HEADS = replace(CASE, model=TwoHeads, loss=both)

REDUCTION, OWN, BIG_BATCH = "reduction", "own gradient", "big batch"


@pytest.mark.parametrize(
    ("case", "step", "kind", "ranks", "parameters", "words"),
    [
        (CASE, maximum_instead_of_sum, REDUCTION, EVERY, 8, "reduced with MAX"),
        (CASE, rank_returns_early, REDUCTION, EVERY, 8, "What rank 3 computed is not in these"),
        (CASE, reduced_to_one_rank, REDUCTION, (1, 2, 3), 8, "reduce with SUM"),
        (CASE, broadcast_before_it_is_reduced, REDUCTION, EVERY, 1, "the marked line replaced it"),
        (UNEVEN, passes_of_one_rank_alone_count_twice, REDUCTION, (0, 1), 8, "not count equally"),
        (CASE, wrong_modulo_of_no_sync, REDUCTION, EVERY, 8, "number 4 stayed on the rank itself"),
        (CASE, weights_of_ranks, REDUCTION, EVERY, 8, "rank 0 0.1, rank 1 0.2, rank 2 0.3, rank 3"),
        (CASE, cleared_between_micro_batches, REDUCTION, EVERY, 8, "number 1 left nothing"),
        (CASE, tail_hook_on_one_rank, REDUCTION, (2,), 1, "rank 2 0.75"),
        (CASE, tail_not_reduced, REDUCTION, EVERY, 1, "Elements 1 to 2 of head.bias are each rank"),
        (CASE, tail_stays_zero, REDUCTION, EVERY, 1, "They are the last 2 of all 171 elements."),
        (CASE, labels_shifted_on_one_rank, OWN, (1,), None, "its own rows give"),
        (CASE, detached_on_one_rank, OWN, (1,), None, "right, and the gradient of norm.bias"),
        (CASE, gradient_hook_on_a_module, OWN, (0,), None, "right, and the gradient of norm.bias"),
        (CASE, targets_of_the_second_micro_batch, OWN, EVERY, None, "backward pass 2 of 2"),
        (CASE, module_skipped_on_one_rank, OWN, (1,), None, "the module norm is not called"),
        (CASE, one_micro_batch_counts_twice, OWN, None, None, "backward pass 1 0.5"),
        (TOKENS, micro_batch_means, BIG_BATCH, None, None, "the losses divide by"),
        (TWO, micro_batch_means_by_hand, BIG_BATCH, None, None, "divide by 5, 3, 5, 3"),
        (PAIRS, pairs_dealt_apart, BIG_BATCH, None, None, "blocks of its order would give"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_kind_and_the_line_of_a_difference_are_found(
    case: Case,
    step: Callable[..., Any],
    kind: str,
    ranks: tuple[int, ...] | None,
    parameters: int | None,
    words: str,
) -> None:
    found = where(case, step)
    assert found.kind == kind
    assert ranks in (None, found.ranks)
    assert parameters in (None, len(found.parameters))
    assert words.casefold() in f"{found.headline}: {found.sentence}".casefold()
    assert distance(found, step) <= NEAR


def test_a_part_that_is_divided_once_more_counts_less() -> None:
    verdict = check(TWO, shrinks_what_is_there)
    assert verdict.outcome == "different", verdict
    shares = "each rank's 2 micro-batches, in their order: 0.0005 1.00"
    assert shares in " ".join(verdict.full_report().split())
    assert "clear the gradients" not in str(verdict)
    assert "parameter.grad /= 2000" in str(verdict)


def test_a_line_that_only_the_wrong_rank_runs_is_pointed_at() -> None:
    found = where(CASE, labels_shifted_on_one_rank)
    notes = {one.line.number: one.note for one in found.lines}
    fault = marked_line(labels_shifted_on_one_rank)
    assert "only rank 1 runs this line" in notes[fault]
    assert re.fullmatch(r"rank 1: its loss is [\d.]+, its own rows give [\d.]+", found.headline)


def test_a_term_that_counts_otherwise_is_marked() -> None:
    found = where(TWO_HEADS, scales_one_term)
    assert "the big batch's" in found.headline
    marked = replace(found, lines=tuple(one for one in found.lines if one.is_fault))
    assert distance(marked, scales_one_term) <= NEAR


def test_a_factor_after_backward_is_no_term_of_the_loss() -> None:
    found = where(TWO_HEADS, reduces_one_head_twice)
    assert found.kind == "reduction"
    assert "term" not in found.headline
