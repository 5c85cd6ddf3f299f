"""Mass spectra of proteins, with a batch normalisation over all ranks written as an autograd function."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SPECTRA, PEAKS, HIDDEN, PROTEINS = 16, 9, 7, 4
EPS = 1e-5


class NormaliseOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        rows = torch.tensor([float(len(x))], dtype=x.dtype)
        moments = torch.cat([x.sum(0), x.square().sum(0), rows])
        dist.all_reduce(moments)
        width = x.shape[1]
        count = moments[-1]
        mean = moments[:width] / count
        variance = moments[width : 2 * width] / count - mean**2
        inverse = (variance + EPS).rsqrt()
        normal = (x - mean) * inverse
        ctx.save_for_backward(normal, inverse)
        ctx.count = count
        return normal

    @staticmethod
    def backward(ctx, grad):
        normal, inverse = ctx.saved_tensors
        sums = torch.stack([grad.sum(0), (grad * normal).sum(0)])
        dist.all_reduce(sums)
        along_mean, along_scale = sums / len(grad)
        return inverse * (grad - along_mean - normal * along_scale)


class Norm(nn.Module):
    """Normalises over the rows of this process, or of all ranks once ``across`` is set."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.across = False

    def forward(self, x):
        if self.across:
            normal = NormaliseOverRanks.apply(x)
        else:
            normal = (x - x.mean(0)) * (x.var(0, unbiased=False) + EPS).rsqrt()
        return normal * self.gain + self.shift


def build_model():
    return nn.Sequential(
        nn.Linear(PEAKS, HIDDEN), Norm(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, PROTEINS)
    )


def make_batch(generator):
    return {
        "peaks": torch.randn(SPECTRA, PEAKS, generator=generator),
        "protein": torch.randint(PROTEINS, (SPECTRA,), generator=generator),
    }


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["peaks"]), batch["protein"])


def synchronise_norms(model):
    for module in model.modules():
        if isinstance(module, Norm):
            module.across = True
    return model


def step(model, shard, rank):
    ddp = DistributedDataParallel(synchronise_norms(model))
    loss(ddp, shard).backward()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
