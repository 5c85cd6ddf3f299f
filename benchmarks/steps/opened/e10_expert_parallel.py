"""Expert parallelism: tokens travel to the rank of their expert and back with all-to-all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, WIDTH, CLASSES, EXAMPLES, EXPERTS = 6, 8, 5, 20, 4

Batch = dict[str, Tensor]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def route(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The gate and the number of the best expert of every token."""
        return self.router(states).softmax(dim=-1).max(dim=-1)

    def forward(self, rows: Tensor) -> Tensor:
        states = torch.tanh(self.encoder(rows))
        gates, chosen = self.route(states)
        outputs = torch.stack([torch.tanh(expert(states)) for expert in self.experts], dim=1)
        mixed = outputs[torch.arange(len(rows)), chosen] * gates.unsqueeze(1)
        return self.head(states + mixed)


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "rows": 2 * torch.randn(EXAMPLES, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["rows"]), batch["labels"])


class AllToAll(torch.autograd.Function):
    """Sends `sent[r]` rows to rank r; the backward sends their gradients home."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        result = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(result, grad.contiguous(), ctx.sent, ctx.received)
        return result, None, None


@dataclass
class Plan:
    order: Tensor  # tokens sorted by expert
    sent: list[int]
    received: list[int]
    experts: Tensor  # the expert of every received token


class ExpertParallel:
    def __init__(self, model: Experts) -> None:
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.per_rank = EXPERTS // self.size

    def plan(self, chosen: Tensor) -> Plan:
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen // self.per_rank, minlength=self.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        experts = chosen.new_empty(int(received.sum()))
        splits = received.tolist(), sent.tolist()
        dist.all_to_all_single(experts, chosen[order], *splits)
        return Plan(order, splits[1], splits[0], experts)

    def forward(self, rows: Tensor) -> Tensor:
        states = torch.tanh(self.model.encoder(rows))
        gates, chosen = self.model.route(states)
        plan = self.plan(chosen)
        arrived = AllToAll.apply(states[plan.order], plan.sent, plan.received)
        outputs = torch.zeros_like(arrived)
        for number in range(self.rank * self.per_rank, (self.rank + 1) * self.per_rank):
            here = (plan.experts == number).unsqueeze(1)
            outputs = torch.where(here, torch.tanh(self.model.experts[number](arrived)), outputs)
        home = AllToAll.apply(outputs, plan.received, plan.sent)
        mixed = torch.empty_like(home).index_copy(0, plan.order, home * gates.unsqueeze(1))
        return self.model.head(states + mixed)

    def reduce_gradients(self) -> None:
        """Dense weights: the mean over ranks. An expert lives once; the others hold zeros."""
        for param in self.model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)
            param.grad /= self.size


case = Case(model=Experts, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    parallel = ExpertParallel(model)
    F.cross_entropy(parallel.forward(shard["rows"]), shard["labels"]).backward()
    parallel.reduce_gradients()
