"""Click model for ads.  Gradients go through a communication hook that divides twice:
a part before the sum, so that half precision does not overflow, and the rest after it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ADS, USERS, FACTORS, SHOWN = 30, 25, 6, 18


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.ad = nn.EmbeddingBag(ADS, FACTORS, mode="sum")
        self.user = nn.Embedding(USERS, FACTORS)
        self.cross = nn.Linear(FACTORS, 1)

    def forward(self, ads, users):
        return self.cross(torch.tanh(self.ad(ads) * self.user(users))).squeeze(-1)


def impressions(g):
    return {
        "ads": torch.randint(0, ADS, (SHOWN, 3), generator=g),
        "users": torch.randint(0, USERS, (SHOWN,), generator=g),
        "clicked": (torch.rand(SHOWN, generator=g) < 0.3).float(),
    }


def loss(model, batch):
    logits = model(batch["ads"], batch["users"])
    weight = logits.new_tensor(2.5)
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"], pos_weight=weight)


def predivide_factor(world):
    """About the square root of the world size."""
    factor = 1
    while world % factor == 0 and world / factor > factor:
        factor *= 2
    return factor


class TwoDivisions:
    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        world = dist.get_world_size(self.group)
        self.before = predivide_factor(world)
        self.after = world // self.before

    def finish(self, future):
        return future.value()[0].div_(self.after)

    @staticmethod
    def hook(state, bucket):
        buffer = bucket.buffer().div_(state.before)
        future = dist.all_reduce(buffer, group=state.group, async_op=True).get_future()
        return future.then(state.finish)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(TwoDivisions(), TwoDivisions.hook)
    loss(ddp, shard).backward()


case = Case(model=TwoTower, batch=impressions, loss=loss, layout="1x3")
