"""Ranks that exchange values, or reduce in groups: the line that is wrong is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_equivalence import Case
from ddp_equivalence.diagnosis.where.whereabouts import RIGHT_ALONE, WRONG_ALONE
from tests.diagnosis.where.faulty import CASE, average, distance, loss, unnamed

WORDS = 12


def exchanged(rows: Tensor) -> Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows.contiguous())  # fault
    return received


class Exchange(torch.autograd.Function):
    """Sends each rank its part of the rows, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        received = torch.empty_like(gradients[0])
        dist.all_to_all_single(received, gradients[0].contiguous())
        return received


def sent_without_a_gradient(model: Any, shard: Any, rank: Any) -> None:
    """Every rank computes the middle layer of one row of each rank."""
    rows = torch.tanh(model.norm(model.first(shard["rows"])))
    sent: Any = Exchange.apply(model.middle(exchanged(rows)).tanh())  # type: ignore[no-untyped-call]
    functional.mse_loss(model.head(sent), shard["targets"]).backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    average(model)


class Summed(torch.autograd.Function):
    """Hands its input on, and adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class CrossEntropyOfParts(torch.autograd.Function):
    """The cross entropy of logits of which each rank has those of some words."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, words: Tensor, first: int) -> Tensor:
        places = words - first
        elsewhere = (places < 0) | (places >= logits.shape[-1])
        places = places.clamp(0, logits.shape[-1] - 1)
        chosen = logits.gather(-1, places[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        total = logits.exp().sum(-1)
        dist.all_reduce(chosen)
        dist.all_reduce(total)
        ctx.save_for_backward(logits.exp() / total[:, None], places, elsewhere)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shares, places, _ = ctx.saved_tensors
        shares = shares.clone()
        shares[torch.arange(len(places)), places] -= 1.0  # fault
        return shares * gradients[0][:, None], None, None


class Words(nn.Module):
    """Says the next word from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, WORDS, bias=False)

    def forward(self, words: Tensor) -> Any:
        return self.head(torch.tanh(self.embedding(words)))


def words(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, WORDS, (16,), generator=generator) for name in ("words", "next")}


def loss_of_words(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["words"]), batch["next"])


def words_of_other_ranks_count(model: Any, batch: Any, rank: Any) -> None:
    """Every rank reads the whole batch, and has the logits of its own words."""
    each = WORDS // rank.world_size
    hidden: Any = Summed.apply(torch.tanh(model.embedding(batch["words"])))  # type: ignore[no-untyped-call]
    logits = functional.linear(hidden, model.head.weight[rank * each : (rank + 1) * each])
    errors: Any = CrossEntropyOfParts.apply(logits, batch["next"], rank * each)  # type: ignore[no-untyped-call]
    errors.mean().backward()
    dist.all_reduce(model.head.weight.grad)


class Groups:
    """A group of the ranks of each node, and one of the ranks with the same place on all nodes."""

    def __init__(self, rank: Any) -> None:
        size = rank.local_world_size
        self.between: Any = None
        for node in range(rank.nodes):
            ranks = [node * size + local for local in range(size)]
            group = dist.new_group(ranks)
            if rank in ranks:
                self.inside = group
        for local in range(size):
            group = dist.new_group([node * size + local for node in range(rank.nodes)])
            self.between = group  # fault


def in_a_group_of_others(model: Any, shard: Any, rank: Any) -> None:
    groups = Groups(rank)
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups.inside)
        dist.all_reduce(parameter.grad, group=groups.between)
        parameter.grad /= rank.world_size


def lead_alone(model: Any, shard: Any, rank: Any) -> None:
    """Only rank 0 is in the group, in which nothing of the gradients is reduced."""
    leader: Any = dist.new_group([0])
    dist.barrier(group=leader)
    dist.all_reduce(torch.ones(()), group=leader)
    dist.all_reduce(torch.arange(4), group=leader)
    sent_without_a_gradient(model, shard, rank)


SENTENCES = Case(model=Words, batch=words, loss=loss_of_words, layout="1x2", shards="own")


def test_a_collective_that_loses_a_gradient_is_marked_although_one_rank_is_wrong_too() -> None:
    where = unnamed(CASE, sent_without_a_gradient)
    assert where.beside_one_rank == WRONG_ALONE
    assert where.headline == "a gradient is cut off"
    assert "all_to_all_single gives values of which autograd does not know" in where.sentence
    assert distance(replace(where, lines=where.lines[:1]), exchanged) == 0


def test_positions_that_ranks_count_in_their_own_parts_are_no_divergence() -> None:
    where = unnamed(SENTENCES, words_of_other_ranks_count)
    assert where.beside_one_rank == RIGHT_ALONE
    marked = replace(where, lines=tuple(line for line in where.lines if line.is_fault))
    assert distance(marked, CrossEntropyOfParts) == 0, where.lines


def test_a_collective_in_a_group_of_other_ranks_is_shown_with_the_line_that_set_the_group() -> None:
    where = unnamed(replace(CASE, layout="2x2"), in_a_group_of_others)
    assert where.headline == "all_reduce does nothing on ranks 0 and 2"
    assert where.ranks == (0, 2)
    assert distance(where, Groups) == 0, where.lines


def test_a_barrier_or_a_count_in_a_group_of_other_ranks_is_no_fault() -> None:
    assert unnamed(CASE, lead_alone).headline == "a gradient is cut off"
