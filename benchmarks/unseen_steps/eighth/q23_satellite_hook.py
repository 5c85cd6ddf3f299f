"""Land cover from satellite bands; a communication hook reduces the buckets of DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

BANDS, COVERS = 6, 5


class LandCover(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectrum = nn.Conv2d(BANDS, 8, 1)
        self.space = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.cover = nn.Conv2d(8, COVERS, 1)

    def forward(self, bands):
        return self.cover(F.hardswish(self.space(self.spectrum(bands))))


def tiles(generator):
    n = 16
    return {
        "bands": torch.randn(n, BANDS, 4, 4, generator=generator),
        "cover": torch.randint(0, COVERS, (n, 4, 4), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["bands"]), batch["cover"])


class Fabric:
    """The groups of ranks that a run uses."""

    def __init__(self, rank):
        self.rank = rank
        size = rank.local_world_size
        self.per_node = [
            dist.new_group(list(range(first, first + size)))
            for first in range(0, rank.world_size, size)
        ]
        self.across = [
            dist.new_group(list(range(place, rank.world_size, size))) for place in range(size)
        ]

    @property
    def node(self):
        return self.per_node[self.rank.node]

    @property
    def peers(self):
        return self.across[self.rank.local_rank]


class MeanOver:
    """A hook that averages a bucket over several groups, one after the other."""

    def __init__(self, *groups):
        self.groups = groups

    def hook(self, _, bucket):
        buffer = bucket.buffer()
        for group in self.groups:
            buffer.div_(dist.get_world_size(group))
            dist.all_reduce(buffer, group=group)
        future = torch.futures.Future()
        future.set_result(buffer)
        return future


def step(model, shard, rank):
    fabric = Fabric(rank)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, MeanOver(fabric.node, fabric.node).hook)
    loss(ddp, shard).backward()


case = Case(model=LandCover, batch=tiles, loss=loss, layout="2x2")
