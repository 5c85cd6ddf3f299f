"""VICReg on two augmented views: invariance, variance and covariance terms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class VICRegConfig:
    inputs: int = 12
    expander: int = 10
    sim_coeff: float = 25.0
    std_coeff: float = 25.0
    cov_coeff: float = 1.0


CONFIG = VICRegConfig()
EXAMPLES = 20


class FullGatherLayer(torch.autograd.Function):
    """Gather tensors from all processes, and support backward propagation."""

    @staticmethod
    def forward(ctx, x):
        output = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(output, x.contiguous())
        return tuple(output)

    @staticmethod
    def backward(ctx, *grads):
        all_gradients = torch.stack(grads)
        return all_gradients[dist.get_rank()]


def batch_all_gather(x):
    return torch.cat(FullGatherLayer.apply(x), dim=0)


def off_diagonal(x):
    n = x.shape[0]
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


class Expander(nn.Module):
    def __init__(self, config: VICRegConfig = CONFIG) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(config.inputs, 16), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, config.expander))

    def forward(self, x):
        return self.projector(self.backbone(x))


def variance_term(z):
    return F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean()


def covariance_term(z):
    centred = z - z.mean(dim=0)
    cov = centred.T @ centred / (z.shape[0] - 1)
    return off_diagonal(cov).pow(2).sum() / z.shape[1]


def vicreg(first, second, gather, config: VICRegConfig = CONFIG):
    repr_loss = F.mse_loss(first, second)
    first, second = gather(first), gather(second)
    std_loss = (variance_term(first) + variance_term(second)) / 2
    cov_loss = covariance_term(first) + covariance_term(second)
    return (
        config.sim_coeff * repr_loss + config.std_coeff * std_loss + config.cov_coeff * cov_loss
    )


def make_batch(generator):
    clean = torch.randn(EXAMPLES, CONFIG.inputs, generator=generator)
    return {
        "view_a": clean + 0.2 * torch.randn(clean.shape, generator=generator),
        "view_b": clean + 0.2 * torch.randn(clean.shape, generator=generator),
    }


def big_batch_loss(model, batch):
    return vicreg(model(batch["view_a"]), model(batch["view_b"]), gather=lambda z: z)


case = Case(model=Expander, batch=make_batch, loss=big_batch_loss, layout="1x2")


class SelfSupervisedTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)

    def embed(self, batch):
        views = torch.cat([batch["view_a"], batch["view_b"]])
        return self.ddp(views).chunk(2)

    def training_step(self, batch) -> None:
        first, second = self.embed(batch)
        vicreg(first, second, gather=batch_all_gather).backward()


def step(model, shard, rank):
    SelfSupervisedTrainer(model).training_step(shard)
