"""Online clustering of two views with swapped assignments; the codes come from Sinkhorn iterations over the
prototype scores of the global batch. Gradients are averaged by DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PROTOTYPES = 8
EPSILON, ITERATIONS, TEMPERATURE = 0.15, 3, 0.2


class ClusterNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.project = nn.Linear(32, 12)
        self.prototypes = nn.Linear(12, PROTOTYPES, bias=False)

    def forward(self, x):
        z = F.normalize(self.project(self.features(x)), dim=1)
        w = F.normalize(self.prototypes.weight, dim=1)
        return z @ w.t()


def build_model():
    return ClusterNet()


def make_batch(generator):
    n = 20
    base = torch.randn(n, 18, generator=generator)
    base[: n // 2] += 1.0
    return {
        "left": base + 0.2 * torch.randn(n, 18, generator=generator),
        "right": base + 0.2 * torch.randn(n, 18, generator=generator),
    }


@torch.no_grad()
def sinkhorn(scores):
    Q = torch.exp(scores / EPSILON).t()
    Q /= Q.sum()
    for _ in range(ITERATIONS):
        Q /= Q.sum(dim=1, keepdim=True) * Q.shape[0]
        Q /= Q.sum(dim=0, keepdim=True) * Q.shape[1]
    return (Q * Q.shape[1]).t()


def swapped(scores_left, scores_right, codes_left, codes_right):
    log_left = F.log_softmax(scores_left / TEMPERATURE, dim=1)
    log_right = F.log_softmax(scores_right / TEMPERATURE, dim=1)
    return -0.5 * ((codes_left * log_right).sum(1).mean() + (codes_right * log_left).sum(1).mean())


def loss(model, batch):
    left, right = model(batch["left"]), model(batch["right"])
    return swapped(left, right, sinkhorn(left.detach()), sinkhorn(right.detach()))


@torch.no_grad()
def distributed_sinkhorn(scores, world_size):
    """Columns of Q are local samples, rows are prototypes."""
    Q = torch.exp(scores / EPSILON).t().contiguous()
    K, B = Q.shape[0], Q.shape[1] * world_size
    total = Q.sum()
    dist.all_reduce(total)
    Q /= total
    for _ in range(ITERATIONS):
        rows = Q.sum(dim=1, keepdim=True)
        Q /= rows * K
        Q /= Q.sum(dim=0, keepdim=True) * B
    return (Q * B).t()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    scores = ddp(torch.cat([shard["left"], shard["right"]]))
    left, right = scores.chunk(2)
    codes = [distributed_sinkhorn(s.detach(), rank.world_size) for s in (left, right)]
    swapped(left, right, *codes).backward()
