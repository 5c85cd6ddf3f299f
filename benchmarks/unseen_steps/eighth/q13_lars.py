"""Large-batch training of a classifier of sensor data with layerwise learning rates (LARS)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ddp_equivalence import Case

SENSORS, TIMES, STATES = 3, 10, 6
STEPS = 2


class Sensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Conv1d(SENSORS, 8, 4, stride=2)
        self.out = nn.Linear(8 * 4, STATES)

    def forward(self, signals):
        return self.out(F.leaky_relu(self.filters(signals)).flatten(1))


def recordings(generator):
    n = 12 * STEPS
    return {
        "signals": torch.randn(n, SENSORS, TIMES, generator=generator),
        "states": torch.randint(0, STATES, (n,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["signals"]), batch["states"])


class Lars(Optimizer):
    def __init__(self, parameters, lr=1.0, trust=0.05, weight_decay=1e-3):
        super().__init__(parameters, {"lr": lr, "trust": trust, "weight_decay": weight_decay})

    def direction(self, p, group):
        """The step of one layer, before the learning rate."""
        gradient = p.grad + group["weight_decay"] * p
        ratio = group["trust"] * (p.norm() + 1e-3) / (gradient.norm() + 1e-6)
        return gradient * ratio

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.direction(p, group), alpha=group["lr"])


class DistributedLars(Lars):
    """LARS for parameters whose gradients come from several processes."""

    def direction(self, p, group):
        update = super().direction(p, group)
        dist.all_reduce(update)
        return update / dist.get_world_size()


def make_optimizer(parameters):
    return Lars(parameters, lr=1.0, trust=0.05)


def start(model, rank):
    optimizer = DistributedLars(model.parameters())

    def train(shard):
        optimizer.zero_grad()
        loss(model, shard).backward()
        optimizer.step()

    return train


case = Case(model=Sensors, batch=recordings, loss=loss, layout="1x2")
step = start
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
