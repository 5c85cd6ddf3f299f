"""Trains with torch.multiprocessing.spawn and a port that its author has chosen."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 4).split(4)
    for step in range(4):
        optimizer.zero_grad()
        rows = data[step * world_size + rank]
        (model(rows).square().mean() * world_size).backward()
        optimizer.step()


if __name__ == "__main__":
    number = int(sys.argv[sys.argv.index("--nprocs") + 1])
    mp.start_processes(train, (number, sys.argv[1]), number, start_method="fork")
