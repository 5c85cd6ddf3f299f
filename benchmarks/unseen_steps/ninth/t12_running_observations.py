"""A value function for a control task, on observations normalised by what was seen in earlier steps."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

ROLLOUTS, OBSERVATION, STEPS, RATE = 48, 5, 3, 0.1


class Observations(nn.Module):
    """Running mean and variance. What is observed now counts from the next step on."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("total", torch.zeros(size))
        self.register_buffer("squares", torch.ones(size))

    def forward(self, x):
        mean = self.total / self.count
        variance = self.squares / self.count - mean**2
        return (x - mean) / (variance + 1e-4).sqrt()

    @torch.no_grad()
    def observe(self, x, exchange=lambda tensor: tensor):
        sums = exchange(torch.stack([x.sum(0), x.square().sum(0)]))
        self.total += sums[0]
        self.squares += sums[1]
        self.count += len(x)


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.observations = Observations(OBSERVATION)
        self.net = nn.Sequential(nn.Linear(OBSERVATION, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x):
        return self.net(self.observations(x)).squeeze(-1)


def rollouts(generator):
    return {
        "observation": 0.6 + 2 * torch.randn(ROLLOUTS, OBSERVATION, generator=generator),
        "return": torch.randn(ROLLOUTS, generator=generator),
    }


def loss(model, batch, **more):
    value = nn.functional.huber_loss(model(batch["observation"]), batch["return"])
    model.observations.observe(batch["observation"], **more)
    return value


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor


def step(model, shard, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    pieces = {key: value.chunk(STEPS) for key, value in shard.items()}
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss(model, {key: parts[number] for key, parts in pieces.items()}, exchange=summed).backward()
        for p in model.parameters():
            p.grad = summed(p.grad) / rank.world_size
        optimizer.step()


case = Case(model=Value, batch=rollouts, loss=loss, layout="1x2")
options = {"compare": "update", "steps": STEPS, "lr": RATE}
