"""Trains a head on what an encoder, which is not trained, computes of each batch."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def loader_of(rows):
    data = TensorDataset(torch.randn(rows, 6), torch.randint(3, (rows,)))
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))


def train(options):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    wrapped = DistributedDataParallel(nn.Linear(8, 3))
    head = wrapped.module if "wrong" in options else wrapped
    tail = DistributedDataParallel(nn.Linear(3, 3))
    of_head = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    of_tail = torch.optim.SGD(tail.parameters(), lr=0.1)
    further, evaluated = iter(loader_of(96)), loader_of(16)
    window = 2 if "accumulating" in options else 1
    for number, (inputs, labels) in enumerate(loader_of(96), 1):
        if "evaluating" in options:
            with torch.no_grad():
                for own, _ in evaluated:
                    wrapped(encoder(own))
        with torch.no_grad():
            code = encoder(inputs)
            if "two_loaders" in options:
                others, more = next(further)
                code, labels = torch.cat([code, encoder(others)]), torch.cat([labels, more])
        (F.cross_entropy(head(code), labels) / window).backward()
        if number % window:
            continue
        of_head.step()
        of_head.zero_grad()
        if "tail" in options:
            loss = F.cross_entropy(tail(head(code).detach()), labels)
            loss.backward()
            if "skipped" not in options or number != 2 or dist.get_rank() == 0:
                of_tail.step()
            of_tail.zero_grad()


if __name__ == "__main__":
    start.run(train)
