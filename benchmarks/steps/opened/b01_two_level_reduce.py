"""Denoiser on 1-D signals. Two machines of unequal size, so gradients are reduced
inside a machine first and only the leaders talk over the slow link."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

MACHINES = [[0], [1, 2, 3]]
LENGTH = 10


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(2, 14)
        self.inp = nn.Linear(LENGTH, 14)
        self.mid = nn.Linear(14, 14)
        self.out = nn.Linear(14, LENGTH)

    def forward(self, noisy, sigma):
        cond = self.time(torch.stack([sigma, sigma.log()], dim=-1))
        h = torch.nn.functional.silu(self.inp(noisy) + cond)
        return self.out(torch.nn.functional.silu(self.mid(h)))


def signals(generator):
    return {
        "clean": torch.randn(16, LENGTH, generator=generator),
        "noise": torch.randn(16, LENGTH, generator=generator),
        "sigma": torch.rand(16, generator=generator) + 0.1,
    }


def denoising_loss(model, batch):
    sigma = batch["sigma"]
    noisy = batch["clean"] + sigma[:, None] * batch["noise"]
    error = (model(noisy, sigma) - batch["noise"]).square().mean(dim=1)
    weight = 1 / (sigma.square() + 1)
    return (weight * error).mean()


class TwoLevelReducer:
    def __init__(self, machines):
        self.me = dist.get_rank()
        self.machines = machines
        for members in machines:
            group = dist.new_group(members)
            if self.me in members:
                self.members, self.local = members, group
        self.leader = self.members[0]
        self.leaders = dist.new_group([members[0] for members in machines])

    def reduce(self, flat):
        # inside the machine
        dist.reduce(flat, self.leader, group=self.local)
        flat.div_(len(self.members))
        # between machines
        if self.me == self.leader:
            dist.all_reduce(flat, group=self.leaders)
            flat.div_(len(self.machines))
        dist.broadcast(flat, self.leader, group=self.local)
        return flat

    def __call__(self, parameters):
        grads = [p.grad for p in parameters]
        flat = torch.cat([g.flatten() for g in grads])
        pieces = self.reduce(flat).split([g.numel() for g in grads])
        for grad, piece in zip(grads, pieces):
            grad.copy_(piece.view_as(grad))


case = Case(model=Denoiser, batch=signals, loss=denoising_loss, layout="1+3")


def step(model, shard, rank):
    reducer = TwoLevelReducer(MACHINES)
    denoising_loss(model, shard).backward()
    reducer(list(model.parameters()))
