"""Only the harder half of the examples is learnt from."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

KEEP = 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)


def losses_of(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="none").mean(dim=1)


def number_kept(examples):
    return max(1, int(KEEP * examples))


def loss(model, batch):
    losses = losses_of(model, batch)
    return losses.topk(number_kept(len(losses))).values.mean()


def make_batch(generator):
    difficulty = torch.linspace(0.2, 3.0, 12)[:, None]
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": difficulty * torch.randn(12, 2, generator=generator),
    }


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x2")


class HardExampleMiner:
    def __init__(self, world_size):
        self.world_size = world_size
        self.last_threshold = None

    def gather(self, losses):
        everyone = [torch.empty_like(losses) for _ in range(self.world_size)]
        dist.all_gather(everyone, losses.detach())
        return torch.cat(everyone)

    def __call__(self, losses):
        candidates = losses.detach()
        kept = number_kept(len(candidates))
        self.last_threshold = candidates.topk(kept).values[-1]
        hard = losses >= self.last_threshold
        return self.world_size * losses[hard].sum() / self.gather(hard.to(losses.dtype)).sum()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    miner = HardExampleMiner(rank.world_size)
    ddp.zero_grad()
    value = miner(losses_of(ddp, shard))
    value.backward()
