"""A communication hook which divides partly before and partly after the sum, against overflow."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_batch(generator):
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": torch.randn(12, 3, generator=generator),
    }


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="1+2")


class SplitDivision:
    """Factors whose product is the number of ranks, both near its square root."""

    def __init__(self, world_size):
        self.before = 1
        while self.before**2 < world_size:
            self.before *= 2
        self.after = world_size // self.before


def reduce_bucket(factors, bucket):
    buffer = bucket.buffer().div_(factors.before)
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def finish(done):
        return done.value()[0].div_(factors.after)

    return future.then(finish)


def step(model, shard, rank):
    replica = DistributedDataParallel(model)
    replica.register_comm_hook(SplitDivision(rank.world_size), reduce_bucket)
    model.zero_grad()
    loss(replica, shard).backward()
