"""Group-robust credit scoring: regions with a high loss get more weight in the step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

REGIONS, SHARPNESS = 3, 4.0


class Scorecard(nn.Module):
    def __init__(self):
        super().__init__()
        self.region = nn.Embedding(REGIONS, 4)
        self.net = nn.Sequential(nn.Linear(12, 10), nn.GELU(), nn.Linear(10, 1))

    def forward(self, batch):
        inputs = torch.cat([batch["features"], self.region(batch["region"])], dim=-1)
        return self.net(inputs).squeeze(-1)


def applications(generator):
    return {
        "features": torch.randn(24, 8, generator=generator),
        "region": torch.randint(REGIONS, (24,), generator=generator),
        "default": torch.randint(2, (24,), generator=generator).float(),
    }


def group_sums(model, batch):
    losses = F.binary_cross_entropy_with_logits(model(batch), batch["default"], reduction="none")
    membership = F.one_hot(batch["region"], REGIONS).to(losses.dtype)
    return membership.T @ losses, membership.sum(dim=0)


def robust_weights(group_means):
    return F.softmax(SHARPNESS * group_means.detach(), dim=0)


def loss(model, batch):
    sums, counts = group_sums(model, batch)
    means = sums / counts.clamp(min=1)
    return (robust_weights(means) * means).sum()


class GroupStatistics:
    """What all ranks have of every group."""

    def __init__(self, sums, counts):
        self.sums = sums.detach().clone()
        self.counts = counts.clone()
        for statistic in (self.counts,):
            dist.all_reduce(statistic)

    @property
    def means(self):
        return self.sums / self.counts.clamp(min=1)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    sums, counts = group_sums(ddp, shard)
    overall = GroupStatistics(sums, counts)
    weights = robust_weights(overall.means)
    objective = (weights * sums / overall.counts.clamp(min=1)).sum()
    (objective * rank.world_size).backward()


case = Case(model=Scorecard, batch=applications, loss=loss)
