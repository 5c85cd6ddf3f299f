"""Trains with what changes from step to step; words on the command line choose it."""

import random

import numpy
import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Balance:
    def __init__(self):
        self.average = {"output": 1.0}

    def moved(self, loss):
        held = self.average["output"]
        self.average["output"] = 0.7 * held + 0.3 * loss
        return held


class Trainer:
    def __init__(self):
        self.balance = Balance()
        self.last = [1.0, 1.0]

    def moved(self, loss):
        self.last = [*self.last[1:], loss]
        return self.last[0]


class Net(nn.Module):
    def __init__(self, dropped):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropped), nn.Tanh(), nn.Linear(8, 3))
        self.mean_length = 1.0

    def forward(self, inputs):
        return self.body(inputs)


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def train(options):
    torch.set_num_threads(2 if "threads" in options else 1)
    torch.manual_seed(0)
    random.seed(3)
    numpy.random.seed(4)
    own, of_numpy = torch.Generator().manual_seed(6), numpy.random.default_rng(7)
    of_rank = random.Random(dist.get_rank())
    net = Net(0.2 if "dropout" in options else 0.0)
    model = DistributedDataParallel(net)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 3))
    sampler = DistributedSampler(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    weights = list(net.parameters())
    mean_length, trainer = 1.0, Trainer()
    torch.manual_seed(dist.get_rank())
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
        if "two_steps" in options and number == 2:
            break
        count = torch.tensor(float(len(inputs)))
        if "counted" in options:
            dist.all_reduce(count)
        optimizer.zero_grad()
        if "lazy" in options and number % 2 == 0:
            with model.no_sync():
                (0.1 * model(inputs).square().mean()).backward()
        if "inner" in options:  # its gradients only decide a step size
            first = torch.autograd.grad(mse_loss(net(inputs), targets), weights)
            assert len(first) == len(weights)
        if "threads" in options:  # large enough for torch to share it among its threads
            inputs = inputs + torch.ones(1 << 18).exp().mul(0.0).sum()
        output = model(inputs)
        loss = mse_loss(output, targets)
        if "counted" in options:
            fit = mse_loss(output, targets, reduction="sum") / 3 / count
            penalty = 0.1 * sum(weight.square().sum() for weight in weights)
            loss = fit * dist.get_world_size() + penalty
            if "penalised" in options:
                loss = (fit + penalty) * dist.get_world_size()
        lengths = output.norm(dim=1)
        if "attribute" in options:
            loss = loss + (lengths - net.mean_length).square().mean()
            mean = (
                float(lengths.mean()) if "own_mean" in options else mean_over_ranks(lengths.mean())
            )
            net.mean_length = 0.9 * net.mean_length + 0.1 * mean
        if "local" in options:
            loss = loss + (lengths - mean_length).square().mean()
            mean_length = 0.9 * mean_length + 0.1 * mean_over_ranks(lengths.mean())
        tasks = {
            "random": lambda: random.randrange(3),
            "numpy": lambda: numpy.random.randint(3),
            "of_numpy": lambda: int(of_numpy.integers(3)),
            "own": lambda: int(torch.randint(3, (1,), generator=own)),
        }
        for name, draw in tasks.items():
            if name in options:
                loss = loss + output[:, draw()].square().mean()
        if "by_rank" in options:
            loss = loss + output[:, of_rank.randrange(3)].square().mean()
        if "own_average" in options:
            loss = loss + output.square().mean() / trainer.balance.moved(loss.item())
        if "own_last" in options:
            loss = loss + output.square().mean() / trainer.moved(loss.item())
        if "uneven" in options:
            loss = loss * (1 + 0.1 * dist.get_rank())
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
