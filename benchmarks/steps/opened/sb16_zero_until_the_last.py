"""Ranks that run out of batches at different times, with DDP and sharded optimizer states.

The one that goes on alone must get the mean over its own rows, as one process would.
"""

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ROWS = 4  # of one rank, in one step
STEPS_OF_RANK = {0: 1, 1: 3}
PER_STEP = tuple(
    ROWS * sum(steps > number for steps in STEPS_OF_RANK.values())
    for number in range(max(STEPS_OF_RANK.values()))
)


def model():
    return nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(generator):
    x = torch.randn(sum(PER_STEP), 5, generator=generator)
    return x, torch.stack([x.sin().sum(1), x.square().mean(1)], dim=1)


def loss(model, batch):
    x, y = batch
    predicted = model(x)
    return nn.functional.l1_loss(predicted, y) + nn.functional.mse_loss(predicted, y)


def queue_of(batch, rank):
    """In each step the rows of the ranks that still have some lie one after the other."""
    first = 0
    for number, rows in enumerate(PER_STEP):
        present = [one for one, steps in STEPS_OF_RANK.items() if steps > number]
        if rank.rank in present:
            start = first + present.index(rank.rank) * ROWS
            yield tuple(part[start : start + ROWS] for part in batch)
        first += rows


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def step(model, batch, rank):
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    # Whatever communicates in the loop has to be shadowed by the ranks that have left it.
    joinables = [one for one in (ddp, optimizer) if isinstance(one, Joinable)]
    with Join(joinables, divide_by_initial_world_size=False):
        for rows in queue_of(batch, rank):
            optimizer.zero_grad(set_to_none=False)
            loss(ddp, rows).backward()
            optimizer.step()


case = Case(model=model, batch=batch, loss=loss, layout="1x2", shards="own")
options = {"compare": "update", "optimizer": make_optimizer, "steps": PER_STEP}
