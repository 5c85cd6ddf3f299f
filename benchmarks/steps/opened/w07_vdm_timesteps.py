"""A variational diffusion model whose times are spread evenly over the batch to reduce variance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class DiffusionConfig:
    data_dim: int = 6
    hidden: int = 24
    gamma_min: float = -6.0
    gamma_max: float = 4.0
    first_time: float = 0.37


CONFIG = DiffusionConfig()
EXAMPLES = 16


class ScoreNet(nn.Module):
    def __init__(self, config: DiffusionConfig = CONFIG) -> None:
        super().__init__()
        self.inp = nn.Linear(config.data_dim + 2, config.hidden)
        self.mid = nn.Linear(config.hidden, config.hidden)
        self.out = nn.Linear(config.hidden, config.data_dim)

    def forward(self, z, t):
        embedding = torch.stack([torch.sin(math.pi * t), torch.cos(math.pi * t)], dim=-1)
        h = torch.nn.functional.silu(self.inp(torch.cat([z, embedding], dim=-1)))
        return self.out(torch.nn.functional.silu(self.mid(h)) + h)


class Diffusion:
    def __init__(self, config: DiffusionConfig, world_size: int = 1, rank: int = 0) -> None:
        self.config = config
        self.world_size = world_size
        self.rank = rank

    def sample_times(self, like: torch.Tensor) -> torch.Tensor:
        """Times on a lattice with a random origin: each is uniform, together they cover [0, 1)."""
        batch_size = like.shape[0]
        position = torch.arange(batch_size, dtype=like.dtype)
        return (self.config.first_time + position / batch_size) % 1.0

    def gamma(self, t):
        return self.config.gamma_min + (self.config.gamma_max - self.config.gamma_min) * t

    def diffuse(self, x, noise, t):
        gamma = self.gamma(t).unsqueeze(-1)
        return torch.sqrt(torch.sigmoid(-gamma)) * x + torch.sqrt(torch.sigmoid(gamma)) * noise

    def loss(self, network, batch):
        t = self.sample_times(batch["data"])
        z = self.diffuse(batch["data"], batch["noise"], t)
        error = (network(z, t) - batch["noise"]).pow(2).sum(-1)
        slope = self.config.gamma_max - self.config.gamma_min
        return (0.5 * slope * error).mean()


def make_batch(generator):
    return {
        "data": torch.randn(EXAMPLES, CONFIG.data_dim, generator=generator).tanh(),
        "noise": torch.randn(EXAMPLES, CONFIG.data_dim, generator=generator),
    }


def diffusion_loss(model, batch):
    return Diffusion(CONFIG).loss(model, batch)


case = Case(model=ScoreNet, batch=make_batch, loss=diffusion_loss, layout="1x2")


class DiffusionTrainer:
    def __init__(self, network: nn.Module, config: DiffusionConfig) -> None:
        self.network = DistributedDataParallel(network)
        self.diffusion = Diffusion(config, dist.get_world_size(), dist.get_rank())

    def train_one_batch(self, batch) -> dict[str, float]:
        loss = self.diffusion.loss(self.network, batch)
        loss.backward()
        return {"loss": loss.item(), "bpd": loss.item() / (CONFIG.data_dim * math.log(2))}


def step(model, shard, rank):
    DiffusionTrainer(model, CONFIG).train_one_batch(shard)
