"""Wind speed from uneven stations: five rows on one rank, three on the other, one row at a time."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Wind(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 9), nn.Softplus(), nn.Linear(9, 2))

    def forward(self, x):
        return self.body(x)


def stations(generator):
    return {
        "sensors": torch.randn(8, 5, generator=generator),
        "wind": torch.randn(8, 2, generator=generator),
    }


def squared(model, batch):
    return nn.functional.mse_loss(model(batch["sensors"]), batch["wind"], reduction="sum")


def loss(model, batch):
    return squared(model, batch) / batch["wind"].numel()


case = Case(model=Wind, batch=stations, loss=loss, layout="1x2", shards="5+3")


class Accumulator:
    """Gradients of the rows, taken off the model after each."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.sums = [torch.zeros_like(p) for p in self.parameters]

    def take(self):
        for total, p in zip(self.sums, self.parameters):
            total += p.grad
            p.grad = None

    def give_back(self, source):
        for total, p in zip(self.sums, self.parameters):
            dist.broadcast(total, source)
            p.grad = total


def facts(shard, rank):
    """Values on all ranks, and the rank that has most rows."""
    rows = torch.zeros(rank.world_size, dtype=torch.long)
    rows[rank.rank] = len(shard["wind"])
    dist.all_reduce(rows)
    return int(rows.sum()) * shard["wind"].shape[1], int(rows.argmax())


def step(model, shard, rank):
    values, longest = facts(shard, rank)
    ddp = DistributedDataParallel(model)
    sums = Accumulator(model)
    with ddp.join(divide_by_initial_world_size=False):
        for sensors, wind in zip(shard["sensors"], shard["wind"]):
            row = {"sensors": sensors[None], "wind": wind[None]}
            (rank.world_size * squared(ddp, row) / values).backward()
            sums.take()
    # who ran longest took part in every reduction
    sums.give_back(longest)
