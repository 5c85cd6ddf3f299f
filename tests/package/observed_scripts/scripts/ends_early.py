"""Trains until its data are over; a word on the command line lets a rank end otherwise."""

import time
from pathlib import Path

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def validation_loss(data):
    """Rank 1 has rows of its own, on which the model seems to be good enough at once."""
    return float(dist.get_rank() == 0) * float(data.tensors[0].abs().mean())


def train(options):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 24 if "uneven" not in options else 24 - 6 * rank
    generator = torch.Generator().manual_seed(1 + rank)
    data = TensorDataset(
        torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)
    )
    if "hangs_at_once" in options:
        Path("the_end_is_near").touch()
        if rank == 1:
            dist.barrier()
    for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=6)):
        if rank == 1 and number == 1:
            Path("the_end_is_near").touch()
            if "sleeps" in options:
                time.sleep(1000)
        loss = nn.functional.mse_loss(model(inputs), targets)
        if "times" in options:
            loss = loss * dist.get_world_size()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "stops" in options and validation_loss(data) == 0.0:
            Path("the_end_is_near").touch()
            break
        if "raises" in options and dist.get_world_size() > 1:
            if rank == 0:
                time.sleep(1000)  # its own error, of a lost connection, could be told first
            raise RuntimeError("rank 1 has no room left")
        if "all_stop" in options and number == 1:
            break
    dist.barrier()


if __name__ == "__main__":
    start.run(train)
