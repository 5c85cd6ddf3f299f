"""A reduced model of a fluid (Koopman operator), with an all-reduce of its own: a ring of sends."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

SNAPSHOTS, SENSORS, MODES = 16, 8, 5


class Koopman(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(SENSORS, 12), nn.Tanh(), nn.Linear(12, MODES))
        self.advance = nn.Linear(MODES, MODES, bias=False)
        self.project = nn.Linear(MODES, SENSORS)

    def forward(self, now):
        z = self.lift(now)
        return self.project(z), self.project(self.advance(z))


def snapshots(generator):
    now = torch.randn(SNAPSHOTS, SENSORS, generator=generator)
    return {"now": now, "next": now.roll(1, 1) + 0.2 * torch.randn(now.shape, generator=generator)}


def loss(model, batch):
    same, later = model(batch["now"])
    return nn.functional.mse_loss(same, batch["now"]) + nn.functional.mse_loss(later, batch["next"])


class Ring:
    """What a rank receives it passes on, until everybody has seen everything."""

    def __init__(self, rank):
        self.rank, self.size = rank.rank, rank.world_size
        self.right = (self.rank + 1) % self.size
        self.left = (self.rank - 1) % self.size

    def shift(self, outgoing):
        incoming = torch.empty_like(outgoing)
        requests = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, outgoing, self.right),
            dist.P2POp(dist.irecv, incoming, self.left),
        ])
        for request in requests:
            request.wait()
        return incoming

    def mean(self, tensor):
        seen, passing = {self.rank: tensor}, tensor
        for hop in range(1, self.size - 1):
            passing = self.shift(passing)
            seen[(self.rank - hop) % self.size] = passing
        # in the order of the ranks, so that all round alike
        return sum(seen[rank] for rank in sorted(seen)) / self.size


def step(model, shard, rank):
    ring = Ring(rank)
    loss(model, shard).backward()
    gradients = [p.grad for p in model.parameters()]
    flat = ring.mean(torch.cat([g.flatten() for g in gradients]))
    for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(piece.view_as(gradient))


case = Case(model=Koopman, batch=snapshots, loss=loss, layout="1x4")
