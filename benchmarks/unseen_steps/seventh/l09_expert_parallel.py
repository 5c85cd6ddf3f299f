"""A mixture of two experts for click prediction; each rank is home to one expert."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH = 5


class Mixture(nn.Module):
    def __init__(self, experts=2):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH))
            for _ in range(experts)
        )
        self.head = nn.Linear(WIDTH, 1)

    def route(self, clicks):
        x = torch.tanh(self.stem(clicks))
        gates = self.router(x).softmax(-1)
        chosen = F.one_hot(gates.argmax(-1), gates.shape[-1]).to(x.dtype)
        return x, gates * chosen, chosen

    def forward(self, clicks):
        x, gates, _ = self.route(clicks)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return self.head(x + (gates.unsqueeze(-1) * outputs).sum(1)).squeeze(-1)


def exchange(tensor):
    tensor = tensor.contiguous()
    return all_to_all_single(torch.empty_like(tensor), tensor)


def expert_parallel(model, clicks, rank):
    x, gates, chosen = model.route(clicks)
    # (expert, row, width); rows for other experts are zero and are masked on the way back
    outgoing = chosen.t().unsqueeze(-1) * x
    arrived = exchange(outgoing)
    done = model.experts[int(rank)](arrived.flatten(0, 1)).view_as(arrived)
    back = exchange(done)
    return model.head(x + (gates.t().unsqueeze(-1) * back).sum(0)).squeeze(-1)


def impressions(generator):
    return {
        "clicks": torch.randn(16, 6, generator=generator),
        "label": torch.randint(0, 2, (16,), generator=generator).float(),
    }


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["clicks"]), batch["label"])


def synchronise(model, rank):
    for name, parameter in model.named_parameters():
        if name.startswith("experts."):
            home = int(name.split(".")[1])
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # The home of an expert has seen the rows of all ranks.
            dist.broadcast(parameter.grad, home)
        else:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


def step(model, shard, rank):
    logits = expert_parallel(model, shard["clicks"], rank)
    F.binary_cross_entropy_with_logits(logits, shard["label"]).backward()
    synchronise(model, rank)


case = Case(model=Mixture, batch=impressions, loss=loss, layout="1x2")
