"""Precipitation maps: buckets are brought to the range -1 to 1 before they travel, and back on arrival."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

MAPS, SIDE = 8, 6
TINY = 1e-30


class Nowcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.last = nn.Conv2d(6, 1, 1)

    def forward(self, maps):
        hidden = F.elu(self.first(maps))
        return self.last(hidden + F.elu(self.second(hidden)))


def make_batch(generator):
    rain = torch.rand(MAPS, 1, SIDE, SIDE, generator=generator)
    # storms come at the end of the season
    strength = torch.linspace(0.2, 3.0, MAPS).view(-1, 1, 1, 1)
    return {
        "maps": torch.randn(MAPS, 2, SIDE, SIDE, generator=generator),
        "rain": rain * strength,
    }


def loss(model, batch):
    return F.mse_loss(model(batch["maps"]), batch["rain"])


@dataclass
class RangeState:
    world_size: int
    scales: dict[int, torch.Tensor] = field(default_factory=dict)


def pack(state, bucket):
    """The buffer in units of its largest element, so that narrow types do not overflow."""
    scale = bucket.buffer().abs().max().clamp(min=TINY)
    state.scales[bucket.index()] = scale
    return bucket.buffer().div_(scale * state.world_size)


def unpack(state, index, buffer):
    return buffer.mul_(state.scales.pop(index))


def range_hook(state, bucket):
    index = bucket.index()
    sent = dist.all_reduce(pack(state, bucket), async_op=True).get_future()
    return sent.then(lambda arrived: unpack(state, index, arrived.value()[0]))


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    ddp.register_comm_hook(RangeState(rank.world_size), range_hook)
    loss(ddp, shard).backward()


case = Case(model=Nowcast, batch=make_batch, loss=loss, layout="1x2")
