"""Variance-invariance-covariance regularisation of a joint embedding. The moments of the embeddings are
those of the global batch, built with a differentiable all-reduce; DDP averages the gradients."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

SIM, STD, COV = 5.0, 5.0, 1.0
EPS = 1e-4


class Expander(nn.Module):
    def __init__(self, dim=24, hidden=32, out=10):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.expand = nn.Linear(hidden, out, bias=False)

    def forward(self, x):
        return self.expand(self.trunk(x))


def build_model():
    return Expander()


def make_batch(generator):
    n = 12
    base = torch.randn(n, 24, generator=generator)
    base = base + torch.linspace(-1.5, 1.5, n)[:, None]
    return {
        "x": base + 0.1 * torch.randn(n, 24, generator=generator),
        "x_aug": base + 0.1 * torch.randn(n, 24, generator=generator),
    }


def hinge(var):
    return F.relu(1.0 - torch.sqrt(var + EPS)).mean()


def off_diagonal_energy(cov):
    return (cov.pow(2).sum() - torch.diagonal(cov).pow(2).sum()) / cov.shape[0]


def loss(model, batch):
    a, b = model(batch["x"]), model(batch["x_aug"])
    total = SIM * F.mse_loss(a, b)
    for z in (a, b):
        centred = z - z.mean(dim=0)
        cov = centred.t() @ centred / (z.shape[0] - 1)
        total = total + 0.5 * STD * hinge(z.var(dim=0)) + COV * off_diagonal_energy(cov)
    return total


class ReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class GlobalMoments:
    """Variance and covariance of embeddings spread over the ranks."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __call__(self, z):
        rows = z.shape[0] * self.world_size
        mean = ReduceSum.apply(z.sum(dim=0)) / rows
        centred = z - mean
        cov = ReduceSum.apply(centred.t() @ centred) / (rows - 1)
        var = ReduceSum.apply(z.var(dim=0)) / self.world_size
        return var, cov


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    moments = GlobalMoments(rank.world_size)
    both = ddp(torch.cat([shard["x"], shard["x_aug"]]))
    a, b = both.chunk(2)
    invariance = ReduceSum.apply(F.mse_loss(a, b)) / rank.world_size
    total = SIM * invariance
    for z in (a, b):
        var, cov = moments(z)
        total = total + 0.5 * STD * hinge(var) + COV * off_diagonal_energy(cov)
    total.backward()
