"""A turbulence closure trained with momentum that is sharded over the ranks."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

CELLS, INVARIANTS, STRESSES = 32, 5, 6
RATE, MOMENTUM, LARGEST, STEPS = 0.1, 0.9, 0.2, 2


def closure():
    return nn.Sequential(nn.Linear(INVARIANTS, 14), nn.Tanh(), nn.Linear(14, STRESSES))


def cells(generator):
    return {
        "invariants": torch.randn(CELLS, INVARIANTS, generator=generator),
        "stresses": 2 * torch.randn(CELLS, STRESSES, generator=generator),
    }


def loss(model, batch):
    return (model(batch["invariants"]) - batch["stresses"]).square().sum(-1).mean()


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


class Sharded:
    """Each rank keeps and updates one slice of the flattened weights."""

    def __init__(self, model, rank):
        self.parameters, self.rank = list(model.parameters()), rank
        self.numel = sum(p.numel() for p in self.parameters)
        self.slice_length = -(-self.numel // rank.world_size)
        self.weights = nn.Parameter(self.mine(self.flat(p.detach() for p in self.parameters)).clone())
        self.optimizer = make_optimizer([self.weights])

    def flat(self, tensors):
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        padding = self.slice_length * self.rank.world_size - self.numel
        return nn.functional.pad(joined, (0, padding))

    def mine(self, flat):
        return flat.narrow(0, self.rank.rank * self.slice_length, self.slice_length)

    def reduce(self):
        flat = self.flat(p.grad for p in self.parameters)
        dist.all_reduce(flat)
        self.weights.grad = self.mine(flat) / self.rank.world_size

    def clip(self, largest):
        norm = self.weights.grad.norm()
        self.weights.grad.mul_((largest / (norm + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def update(self):
        self.optimizer.step()
        parts = [torch.empty_like(self.weights) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, self.weights.detach())
        flat = torch.cat(parts)[: self.numel]
        for p, new in zip(self.parameters, flat.split([p.numel() for p in self.parameters])):
            p.copy_(new.view_as(p))
            p.grad = None


def step(model, shard, rank):
    sharded = Sharded(model, rank)
    for invariants, stresses in zip(*(value.chunk(STEPS) for value in shard.values())):
        loss(model, {"invariants": invariants, "stresses": stresses}).backward()
        sharded.reduce()
        sharded.clip(LARGEST)
        sharded.update()


case = Case(model=closure, batch=cells, loss=loss, layout="1x2")
options = {"compare": "update", "steps": STEPS, "optimizer": make_optimizer, "clip": LARGEST}
