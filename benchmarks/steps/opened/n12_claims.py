"""Insurance claims with an optimizer whose state is divided among the ranks."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

POLICIES, COLUMNS = 16, 11
LR, MOMENTUM, MAX_NORM, STEPS = 0.05, 0.9, 0.4, 2


class Claims(nn.Module):
    """Frequency and severity from shared features."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(COLUMNS, 18), nn.ReLU(), nn.Linear(18, 12), nn.ReLU())
        self.frequency = nn.Linear(12, 1)
        self.severity = nn.Linear(12, 1)

    def forward(self, columns):
        hidden = self.shared(columns)
        return self.frequency(hidden)[:, 0], self.severity(hidden)[:, 0]


def make_batch(generator):
    return {
        "columns": torch.randn(POLICIES, COLUMNS, generator=generator),
        "claims": torch.poisson(torch.full((POLICIES,), 1.5), generator=generator),
        "cost": torch.rand(POLICIES, generator=generator) * 4 + 0.1,
    }


def loss(model, batch):
    log_rate, log_cost = model(batch["columns"])
    frequency = (log_rate.exp() - batch["claims"] * log_rate).mean()
    severity = (batch["cost"] * (-log_cost).exp() + log_cost).mean()
    return frequency + severity


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


class ShardedSgd:
    """Every parameter has one owner, which holds its momentum and sends out the new weights."""

    def __init__(self, parameters, rank):
        self.parameters = list(parameters)
        self.rank = rank
        self.owner = self._assign()
        self.mine = [p for p in self.parameters if self.owner[p] == rank.rank]
        self.inner = make_optimizer(self.mine)

    def _assign(self):
        load = [0] * self.rank.world_size
        owner = {}
        for parameter in sorted(self.parameters, key=lambda p: -p.numel()):
            lightest = load.index(min(load))
            owner[parameter] = lightest
            load[lightest] += parameter.numel()
        return owner

    def reduce(self):
        for parameter in self.parameters:
            dist.reduce(parameter.grad, dst=self.owner[parameter])
            parameter.grad.div_(self.rank.world_size)

    def clip(self, max_norm):
        squared = torch.stack([p.grad.square().sum() for p in self.mine]).sum()
        factor = (max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter in self.mine:
            parameter.grad.mul_(factor)

    def step(self):
        self.inner.step()
        for parameter in self.parameters:
            dist.broadcast(parameter.data, src=self.owner[parameter])
            parameter.grad = None


class Training:
    def __init__(self, model, rank):
        self.model = model
        self.optimizer = ShardedSgd(model.parameters(), rank)

    def __call__(self, shard):
        loss(self.model, shard).backward()
        self.optimizer.reduce()
        self.optimizer.clip(MAX_NORM)
        self.optimizer.step()


case = Case(model=Claims, batch=make_batch, loss=loss, layout="1x2")
step = Training
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": STEPS}
