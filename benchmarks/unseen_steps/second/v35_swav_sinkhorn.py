"""SwAV: one view's prototype assignments, balanced over all ranks, are the other's targets."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXAMPLES, FEATURES = 16, 8


@dataclass(frozen=True)
class SwavConfig:
    prototypes: int = 6
    width: int = 5
    epsilon: float = 0.05
    iterations: int = 3
    temperature: float = 0.3


CONFIG = SwavConfig()


class Swav(nn.Module):
    def __init__(self, config=CONFIG):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, config.width))
        self.prototypes = nn.Linear(config.width, config.prototypes, bias=False)

    def forward(self, x):
        return self.prototypes(F.normalize(self.encoder(x), dim=-1))


class Sinkhorn:
    """Columns are examples, rows are prototypes; all prototypes are used equally often."""

    def __init__(self, config, distributed):
        self.config, self.distributed = config, distributed

    def over_ranks(self, tensor, op=dist.ReduceOp.SUM):
        if self.distributed:
            dist.all_reduce(tensor, op=op)
        return tensor

    @torch.no_grad()
    def __call__(self, scores):
        scaled = scores.T / self.config.epsilon
        peak = scaled.max()
        codes = (scaled - peak).exp()
        codes /= self.over_ranks(codes.sum())
        examples = self.over_ranks(torch.tensor(codes.size(1)))
        for _ in range(self.config.iterations):
            codes /= self.over_ranks(codes.sum(dim=1, keepdim=True)) * self.config.prototypes
            codes /= codes.sum(dim=0, keepdim=True) * examples
        return (codes * examples).T


def swapped_prediction(scores1, scores2, sinkhorn):
    def cross_entropy(target, scores):
        log_probabilities = (scores / CONFIG.temperature).log_softmax(dim=-1)
        return -(target * log_probabilities).sum(dim=-1).mean()

    codes1, codes2 = sinkhorn(scores1), sinkhorn(scores2)
    return (cross_entropy(codes1, scores2) + cross_entropy(codes2, scores1)) / 2


def training_loss(model, batch, sinkhorn):
    scores = model(torch.cat([batch["crop1"], batch["crop2"]]))
    return swapped_prediction(*scores.chunk(2), sinkhorn)


def loss(model, batch):
    return training_loss(model, batch, Sinkhorn(CONFIG, distributed=False))


def make_batch(generator):
    images = 2 * torch.randn(EXAMPLES, FEATURES, generator=generator)
    noise = torch.randn(2, EXAMPLES, FEATURES, generator=generator)
    return {"crop1": images + 0.5 * noise[0], "crop2": images + 0.5 * noise[1]}


case = Case(model=Swav, batch=make_batch, loss=loss, layout="2x2")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    sinkhorn = Sinkhorn(CONFIG, distributed=rank.world_size > 1)
    training_loss(ddp, shard, sinkhorn).backward()
