"""Steps whose ranks exchange values in the forward pass, or reduce in groups, with one mistake.

The faulty line ends with the comment ``# fault``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.diagnosis.where.faulty import average, loss

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


class Levels:
    """The groups of the ranks of a node, and of the ranks with the same place on all nodes."""

    def __init__(self, rank: Any) -> None:
        every, size = range(rank.world_size), rank.local_world_size
        inside = [[r for r in every if r // size == node] for node in range(rank.nodes)]
        between = [[r for r in every if r // size == place] for place in range(size)]  # fault
        self.inside = self.own_group(inside, rank)
        self.between = self.own_group(between, rank)

    def own_group(self, of_every_rank: Any, rank: Any) -> Any:
        groups = {tuple(ranks): dist.new_group(ranks) for ranks in of_every_rank}
        return next(group for ranks, group in groups.items() if rank in ranks)


def in_two_levels(model: Any, shard: Any, rank: Any) -> None:
    """Each rank of a node sends its part of the node's sum to the other nodes."""
    levels = Levels(rank)
    loss(model, shard).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    flat = functional.pad(flat, (0, -len(flat) % rank.local_world_size))
    dist.all_reduce(flat, group=levels.inside)
    parts = list(flat.chunk(rank.local_world_size))
    own = parts[rank.local_rank].clone()
    dist.all_reduce(own, group=levels.between)
    dist.all_gather(parts, own, group=levels.inside)
    flat = torch.cat(parts) / rank.world_size
    for parameter in model.parameters():
        parameter.grad.copy_(flat[: parameter.numel()].view_as(parameter))
        flat = flat[parameter.numel() :]
