"""Attention over long event streams: the ranks of a node hold a part of every sequence each."""

from __future__ import annotations

from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

EVENTS, WIDTH, HEADS = 8, 8, 2


class GatherSequence(torch.autograd.Function):
    """Joins the parts of all ranks of the group along the sequence."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group, ctx.length = group, part.shape[1]
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        place = dist.get_rank(ctx.group)
        whole = gradient.contiguous()
        return whole.narrow(1, place * ctx.length, ctx.length).clone(), None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        def heads(tensor: Tensor) -> Tensor:
            return tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        keys, values = gather(self.key_value(x)).chunk(2, dim=-1)
        scores = heads(self.query(x)) @ heads(keys).transpose(-1, -2) / (WIDTH / HEADS) ** 0.5
        mixed = scores.softmax(dim=-1) @ heads(values)
        return self.out(mixed.transpose(1, 2).flatten(2))


class StreamModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.place = nn.Parameter(torch.randn(EVENTS, WIDTH) / 2)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.rate = nn.Linear(WIDTH, 1)

    def forward(self, events: Tensor, first: int = 0, gather=lambda part: part) -> Tensor:
        x = self.enter(events) + self.place[first : first + events.shape[1]]
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), gather)
        return self.rate(x).squeeze(-1)


def poisson(log_rate: Tensor, counts: Tensor, reduction: str) -> Tensor:
    return F.poisson_nll_loss(log_rate, counts, log_input=True, reduction=reduction)


def loss(model: nn.Module, batch: dict) -> Tensor:
    return poisson(model(batch["events"]), batch["counts"], "mean")


def streams(generator: torch.Generator) -> dict:
    return {
        "events": torch.randn(8, EVENTS, 3, generator=generator),
        "counts": torch.randint(0, 4, (8, EVENTS), generator=generator).float(),
    }


case = Case(model=StreamModel, batch=streams, loss=loss, layout="2x2", shards="own")


def step(model: nn.Module, batch: dict, rank) -> None:
    nodes = torch.arange(rank.world_size).view(rank.nodes, -1).tolist()
    group = [dist.new_group(node) for node in nodes][rank.node]
    length = EVENTS // rank.local_world_size
    first = rank.local_rank * length

    def mine(tensor: Tensor) -> Tensor:
        return tensor.chunk(rank.nodes)[rank.node][:, first : first + length]

    log_rate = model(mine(batch["events"]), first, lambda part: GatherSequence.apply(part, group))
    (poisson(log_rate, mine(batch["counts"]), "sum") / batch["counts"].numel()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
