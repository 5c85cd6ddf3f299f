"""Trains in phases, each with a loader of its own. ``wrong``: the second phase is not reduced."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def loader(batch_size, inputs=8, batches=2):
    rows = batch_size * batches * dist.get_world_size()
    data = TensorDataset(torch.randn(rows, inputs), torch.randn(rows, 4))
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, shuffle=False))


def wrapped(*layers):
    torch.manual_seed(0)
    net = nn.Sequential(*layers)
    return net, DistributedDataParallel(net)


def step(model, optimizer, batch):
    inputs, targets = batch
    optimizer.zero_grad()
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def fit(model, optimizer, batches):
    for batch in batches:
        step(model, optimizer, batch)


def first_the_head(second):
    """The second phase has another optimizer, and batches of another size."""
    net, model = wrapped(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    fit(model, torch.optim.SGD(net[2].parameters(), lr=0.1), loader(4))
    fit(second(model), torch.optim.Adam(net.parameters(), lr=0.01), loader(6))


def two_models(second):
    """The second model learns from what the first one computes."""
    first, model = wrapped(nn.Linear(8, 4))
    fit(model, torch.optim.SGD(first.parameters(), lr=0.1), loader(4))
    net, model = wrapped(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, _ in loader(4):
        with torch.no_grad():
            targets = first(inputs)
        step(second(model), optimizer, (inputs, targets))


def in_turns(second):
    """An epoch of the one loader, an epoch of the other, and again."""
    net, model = wrapped(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    one, other = loader(4, batches=1), loader(6, batches=1)
    for _ in range(2):
        fit(model, optimizer, one)
        fit(second(model), optimizer, other)


KINDS = {one.__name__: one for one in (first_the_head, two_models, in_turns)}


def train(options):
    KINDS[options[0]](lambda model: model.module if "wrong" in options else model)


if __name__ == "__main__":
    start.run(train)
