"""PPO's critic: its value head is warmed up alone before the backbone learns with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH = 18, 6, 16, 8

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class CriticConfig:
    warmup_steps: int = 100
    clip_value: float = 0.2
    resume_at: int = 100  # the step at which this run was resumed


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"embed": nn.Embedding(VOCAB, WIDTH), "rnn": nn.GRU(WIDTH, WIDTH, batch_first=True)}
        )
        self.value_head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.backbone["rnn"](self.backbone["embed"](tokens))
        return self.value_head(states).squeeze(-1)


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "tokens": torch.randint(VOCAB, (EXAMPLES, LENGTH), generator=generator),
        "old_values": 0.3 * torch.randn(EXAMPLES, LENGTH, generator=generator),
        "returns": torch.randn(EXAMPLES, LENGTH, generator=generator),
    }


def value_loss(model: nn.Module, batch: Batch, clip: float) -> Tensor:
    values, old = model(batch["tokens"]), batch["old_values"]
    clipped = old + (values - old).clamp(-clip, clip)
    errors = (values - batch["returns"]).square(), (clipped - batch["returns"]).square()
    return 0.5 * torch.maximum(*errors).mean()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return value_loss(model, batch, CriticConfig().clip_value)


class WarmupSchedule:
    """Freezes the backbone during warm-up, and thaws it afterwards."""

    def __init__(self, config: CriticConfig) -> None:
        self.config = config

    def start(self, critic: Critic) -> None:
        critic.backbone.requires_grad_(False)

    def update(self, critic: Critic, step: int) -> bool:
        """Whether the set of trainable parameters was changed."""
        if step < self.config.warmup_steps:
            return False
        critic.backbone.requires_grad_(True)
        return True


class CriticTrainer:
    def __init__(self, critic: Critic, config: CriticConfig) -> None:
        self.critic, self.config = critic, config
        self.schedule = WarmupSchedule(config)
        self.schedule.start(critic)
        self.ddp = DistributedDataParallel(critic)
        self.global_step = config.resume_at

    def on_step_start(self) -> None:
        if self.schedule.update(self.critic, self.global_step):
            self.critic.train()

    def train_step(self, batch: Batch) -> Tensor:
        self.on_step_start()
        value = value_loss(self.ddp, batch, self.config.clip_value)
        value.backward()
        self.global_step += 1
        return value.detach()


case = Case(model=Critic, batch=make_batch, loss=loss, layout="2x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    CriticTrainer(model, CriticConfig()).train_step(shard)
