"""VICReg on product photos: variance and covariance are those of the embeddings of all GPUs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SIM, STD, COV = 25.0, 25.0, 1.0


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.SiLU(), nn.Flatten())
        self.expander = mlp(6 * 9, 24, 16)

    def forward(self, x):
        return self.expander(self.encoder(x))


def two_views(generator):
    clean = torch.randn(16, 1, 8, 8, generator=generator)
    return {
        "a": clean + 0.3 * torch.randn(16, 1, 8, 8, generator=generator),
        "b": clean + 0.3 * torch.randn(16, 1, 8, 8, generator=generator),
    }


def off_diagonal(m):
    return m - torch.diag(m.diagonal())


def vicreg(za, zb):
    n, d = za.shape
    value = SIM * F.mse_loss(za, zb)
    for z in (za, zb):
        z = z - z.mean(dim=0)
        std = (z.square().sum(dim=0) / (n - 1) + 1e-4).sqrt()
        covariance = z.T @ z / (n - 1)
        value = value + STD * F.relu(1 - std).mean() / 2
        value = value + COV * off_diagonal(covariance).square().sum() / d
    return value


def loss(model, batch):
    return vicreg(*model(torch.cat([batch["a"], batch["b"]])).chunk(2))


case = Case(model=Siamese, batch=two_views, loss=loss, layout="1x4")


class BatchGather:
    """All embeddings, of which the own ones keep their graph: those of others are constants.

    So a rank's backward has only what reaches the weights by its own rows, and the gradients of
    all ranks are to be added up.
    """

    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def gradient_scale(self):
        return self.world_size if dist.get_backend() == "nccl" else 1

    def __call__(self, z):
        parts = [torch.empty_like(z) for _ in range(self.world_size)]
        dist.all_gather(parts, z.detach())
        parts[self.rank] = z
        return torch.cat(parts)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    gather = BatchGather()
    za, zb = ddp(torch.cat([shard["a"], shard["b"]])).chunk(2)
    (gather.gradient_scale * vicreg(gather(za), gather(zb))).backward()
