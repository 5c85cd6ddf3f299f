"""Trains with a loss scale, and a loader that is read ahead of the step by one batch."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def read_ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following


def train(options):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for inputs, targets in read_ahead(loader):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        if "times" in options:
            loss = loss * dist.get_world_size()
        scaler.scale(loss).backward()
        if "by_hand" in options:
            for parameter in model.parameters():
                parameter.grad /= scaler.get_scale()
        elif "scaled" not in options:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if "by_hand" in options:
            optimizer.step()
            continue
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    start.run(train)
