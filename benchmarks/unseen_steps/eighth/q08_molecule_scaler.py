"""Energies of small molecules. The loss is scaled, as for half precision, with a growing factor."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ATOMS, KINDS = 6, 5
MAX_NORM = 0.5
STEPS = 3


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(KINDS, 8)
        self.pair = nn.Sequential(nn.Linear(17, 16), nn.SiLU(), nn.Linear(16, 8))
        self.atom = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, kinds, places):
        e = self.kind(kinds)
        distance = (places[:, :, None] - places[:, None]).square().sum(-1, keepdim=True)
        left = e[:, :, None].expand(-1, -1, ATOMS, -1)
        right = e[:, None].expand(-1, ATOMS, -1, -1)
        message = self.pair(torch.cat([left, right, torch.exp(-distance)], -1)).sum(2)
        return self.atom(torch.cat([e, message], -1)).sum((1, 2))


def molecules(generator):
    n = 8 * STEPS
    return {
        "kinds": torch.randint(0, KINDS, (n, ATOMS), generator=generator),
        "places": torch.randn(n, ATOMS, 3, generator=generator),
        "energy": 5 * torch.randn(n, generator=generator),
    }


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["kinds"], batch["places"]), batch["energy"])


class Scaler:
    def __init__(self, scale=256.0, growth=2.0, interval=2):
        self.scale, self.growth, self.interval = scale, growth, interval
        self.good = 0

    def scaled(self, value):
        return value * self.scale

    def unscale(self, parameters):
        for p in parameters:
            p.grad.div_(self.scale)

    def update(self):
        self.good += 1
        if self.good % self.interval == 0:
            self.scale *= self.growth


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def trainer(model, rank):
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    parameters = list(model.parameters())
    optimizer, scaler = make_optimizer(parameters), Scaler()

    def run(shard):
        optimizer.zero_grad()
        scaler.scaled(loss(ddp, shard)).backward()
        norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        scaler.unscale(parameters)
        if torch.isfinite(norm):
            optimizer.step()
        scaler.update()

    return run


case = Case(model=Potential, batch=molecules, loss=loss, layout="1x2")
step = trainer
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": STEPS}
