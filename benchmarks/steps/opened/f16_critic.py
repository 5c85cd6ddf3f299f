"""Wasserstein critic with gradient penalty, trained in micro-batches with clipped gradients."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Case


@dataclass(frozen=True)
class CriticConfig:
    data: int = 8
    width: int = 14
    penalty: float = 10.0
    max_norm: float = 0.5
    micro_batches: int = 2


CFG = CriticConfig()


class Critic(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(cfg.data, cfg.width),
            nn.Softplus(),
            nn.Linear(cfg.width, cfg.width),
            nn.Softplus(),
            nn.Linear(cfg.width, 1),
        )

    def forward(self, samples):
        return self.layers(samples).squeeze(-1)


def gradient_penalty(critic, real, fake, mix):
    between = torch.lerp(real, fake, mix).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def critic_loss(critic, batch, cfg=CFG):
    real, fake = batch["real"], batch["fake"].detach()
    distance = critic(fake).mean() - critic(real).mean()
    return distance + cfg.penalty * gradient_penalty(critic, real, fake, batch["mix"])


def split(batch, parts):
    chunks = {name: tensor.chunk(parts) for name, tensor in batch.items()}
    return [{name: pieces[i] for name, pieces in chunks.items()} for i in range(parts)]


class GradientSync:
    """One all_reduce over all gradients, flattened."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def average(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.parameters])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        start = 0
        for parameter in self.parameters:
            parameter.grad.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()


class CriticTrainer:
    def __init__(self, critic, cfg=CFG):
        self.cfg = cfg
        self.critic = critic
        self.sync = GradientSync(critic.parameters())
        for parameter in critic.parameters():
            dist.broadcast(parameter.data, src=0)

    def accumulate(self, batch):
        for micro in split(batch, self.cfg.micro_batches):
            loss = critic_loss(self.critic, micro, self.cfg) / self.cfg.micro_batches
            loss.backward()

    def update_gradients(self, batch):
        self.critic.zero_grad(set_to_none=True)
        self.accumulate(batch)
        clip_grad_norm_(self.critic.parameters(), self.cfg.max_norm)
        self.sync.average()


def make_batch(generator):
    return {
        "real": torch.randn(16, CFG.data, generator=generator) + 1.0,
        "fake": 0.5 * torch.randn(16, CFG.data, generator=generator),
        "mix": torch.rand(16, 1, generator=generator),
    }


case = Case(model=Critic, batch=make_batch, loss=critic_loss, layout="1x2")


def step(model, shard, rank):
    CriticTrainer(model).update_gradients(shard)
