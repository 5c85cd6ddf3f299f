"""System identification of a plant. The learning rate warms up by samples seen, not by steps."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

BIG_BATCH, STEPS = 16, 3
PEAK, WARM_UP = 0.2, 80  # learning rate, and the samples until it is reached


class Plant(nn.Module):
    """x' = A x + B u + a small correction."""

    def __init__(self, states=4, inputs=2):
        super().__init__()
        self.a = nn.Linear(states, states, bias=False)
        self.b = nn.Linear(inputs, states, bias=False)
        self.correction = nn.Sequential(
            nn.Linear(states + inputs, 8), nn.Tanh(), nn.Linear(8, states)
        )

    def forward(self, x, u):
        return self.a(x) + self.b(u) + 0.1 * self.correction(torch.cat([x, u], dim=-1))


def log_of_plant(generator):
    samples = BIG_BATCH * STEPS
    return {
        "x": torch.randn(samples, 4, generator=generator),
        "u": torch.randn(samples, 2, generator=generator),
        "next": torch.randn(samples, 4, generator=generator),
    }


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"], batch["u"]), batch["next"])


def warm(seen):
    return min(1.0, seen / WARM_UP)


def make_optimizer(parameters):
    optimizer = torch.optim.SGD(parameters, lr=PEAK)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: warm((done + 1) * BIG_BATCH))
    return [optimizer, schedule]


class SampleSchedule:
    def __init__(self, optimizer):
        self.optimizer, self.seen = optimizer, 0

    def advance(self, samples):
        self.seen += samples
        for group in self.optimizer.param_groups:
            group["lr"] = PEAK * warm(self.seen)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=PEAK)
    schedule = SampleSchedule(optimizer)
    for x, u, target in zip(*(shard[key].chunk(STEPS) for key in ("x", "u", "next"))):
        optimizer.zero_grad()
        loss(ddp, {"x": x, "u": u, "next": target}).backward()
        schedule.advance(len(x))
        optimizer.step()


case = Case(model=Plant, batch=log_of_plant, loss=loss, layout="1x2")
options = {"compare": "update", "steps": STEPS, "optimizer": make_optimizer}
