"""Redundancy reduction on two augmented views: the cross-correlation matrix of the projections is summed
over the ranks, then pushed to the identity. The encoder is wrapped in DDP."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

LAMBDA = 0.02
SCALE = 0.5


def off_diagonal(matrix):
    n = matrix.shape[0]
    return matrix.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class Projector(nn.Module):
    def __init__(self, width=16, out=12):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, 24), nn.Linear(24, 24), nn.Linear(24, out)])
        self.norm = nn.LayerNorm(out, elementwise_affine=False)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.norm(self.layers[-1](x))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.projector = Projector()

    def forward(self, first, second):
        return self.projector(self.encoder(first)), self.projector(self.encoder(second))


def build_model():
    return Siamese()


def make_batch(generator):
    n = 16
    clean = torch.randn(n, 3, 8, 8, generator=generator)
    return {
        "first": clean + 0.2 * torch.randn(n, 3, 8, 8, generator=generator),
        "second": clean.flip(-1) + 0.2 * torch.randn(n, 3, 8, 8, generator=generator),
    }


def redundancy(c):
    on_diag = (torch.diagonal(c) - 1).pow(2).sum()
    off_diag = off_diagonal(c).pow(2).sum()
    return SCALE * (on_diag + LAMBDA * off_diag)


def loss(model, batch):
    z1, z2 = model(batch["first"], batch["second"])
    return redundancy(z1.t() @ z2 / z1.shape[0])


def total_rows(rows):
    count = torch.tensor([rows])
    dist.all_reduce(count)
    return int(count)


def cross_correlation(z1, z2):
    """Cross-correlation over the effective batch of all ranks."""
    c = z1.t() @ z2
    c.div_(total_rows(z1.shape[0]))
    dist.all_reduce(c)
    return c


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    model.zero_grad(set_to_none=True)
    z1, z2 = ddp(shard["first"], shard["second"])
    c = cross_correlation(z1, z2)
    objective = redundancy(c)
    objective.backward()
