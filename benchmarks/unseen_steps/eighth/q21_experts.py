"""A mixture of experts for fluid states: every rank has one expert, which sees all examples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

STATE, WIDTH, EXPERTS = 6, 8, 2


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(STATE, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 10), nn.SiLU(), nn.Linear(10, WIDTH))
            for _ in range(EXPERTS)
        )
        self.leave = nn.Linear(WIDTH, STATE)

    def forward(self, state):
        x = torch.tanh(self.enter(state))
        weights = self.gate(x).softmax(-1)
        mixed = sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        return self.leave(x + mixed)


def states(generator):
    n = 16
    return {
        "now": torch.randn(n, STATE, generator=generator),
        "later": torch.randn(n, STATE, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["now"]), batch["later"])


def own_part(rows):
    return rows.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def joined(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


class Dispatch(torch.autograd.Function):
    """The examples of all ranks go to every expert."""

    @staticmethod
    def forward(ctx, rows):
        return joined(rows)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return own_part(gradient)


class Combine(torch.autograd.Function):
    """The outputs of all experts are added, and every rank takes its examples back."""

    @staticmethod
    def forward(ctx, rows):
        rows = rows.clone()
        dist.all_reduce(rows)
        return own_part(rows)

    @staticmethod
    def backward(ctx, gradient):
        return joined(gradient)


def forward(model, now, rank):
    x = torch.tanh(model.enter(now))
    weights = model.gate(x).softmax(-1)
    sent = Dispatch.apply(torch.cat([x, weights], -1))
    x_of_all, weight = sent[:, :WIDTH], sent[:, WIDTH + rank.rank, None]
    mixed = Combine.apply(weight * model.experts[rank.rank](x_of_all))
    return model.leave(x + mixed)


def step(model, shard, rank):
    F.mse_loss(forward(model, shard["now"], rank), shard["later"]).backward()
    for name, p in model.named_parameters():
        if name.startswith("experts."):
            # There is one copy of an expert, so nothing has to be averaged.
            owner, copies = int(name.split(".")[1]), 1
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.broadcast(p.grad, src=owner)
        else:
            copies = rank.world_size
            dist.all_reduce(p.grad)
        p.grad /= copies


case = Case(model=Mixture, batch=states, loss=loss, layout="1x2")
