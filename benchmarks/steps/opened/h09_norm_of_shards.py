"""ZeRO-2 by hand: each gradient is summed to its owner, clipped there, stepped there, and sent back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

LIMIT, LR = 0.25, 0.1


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(1, 6, 3, padding=1)
        self.down = nn.Conv1d(6, 6, 2, stride=2)
        self.up = nn.ConvTranspose1d(6, 6, 2, stride=2)
        self.leave = nn.Conv1d(12, 1, 1)

    def forward(self, signal):
        high = F.relu(self.enter(signal))
        low = F.relu(self.up(F.relu(self.down(high))))
        return self.leave(torch.cat([high, low], 1))


class Zero2:
    def __init__(self, model, rank):
        self.rank = rank
        self.everything = list(model.parameters())
        self.mine = [p for i, p in enumerate(self.everything) if self.owner(i) == rank.rank]
        self.inner = make_optimizer(self.mine)

    def owner(self, index):
        return index % self.rank.world_size

    def scatter(self):
        for index, parameter in enumerate(self.everything):
            parameter.grad /= self.rank.world_size
            dist.reduce(parameter.grad, dst=self.owner(index))

    def norm(self):
        squares = [p.grad.square().sum() for p in self.mine]
        total = torch.stack(squares).sum()
        return total.sqrt()

    def clip(self, limit):
        factor = (limit / (self.norm() + 1e-6)).clamp(max=1.0)
        for parameter in self.mine:
            parameter.grad *= factor

    def step(self):
        self.inner.step()
        with torch.no_grad():
            for index, parameter in enumerate(self.everything):
                dist.broadcast(parameter, src=self.owner(index))
                parameter.grad = None


def noisy_signals(generator):
    clean = torch.randn(16, 1, 12, generator=generator).cumsum(-1)
    return clean + torch.randn(16, 1, 12, generator=generator), clean


def loss(model, batch):
    noisy, clean = batch
    return F.mse_loss(model(noisy), clean)


class Train:
    def __init__(self, model, rank):
        self.model, self.optimizer = model, Zero2(model, rank)

    def __call__(self, shard):
        loss(self.model, shard).backward()
        self.optimizer.scatter()
        self.optimizer.clip(LIMIT)
        self.optimizer.step()


case = Case(model=Unet, batch=noisy_signals, loss=loss, layout="1x2")
step = Train
options = {"compare": "update", "optimizer": make_optimizer, "clip": LIMIT, "steps": 1}
