"""A small character model, trained for two steps with FSDP, SGD and clipped gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class TrainConfig:
    vocabulary: int = 29
    width: int = 16
    blocks: int = 2
    context: int = 6
    lr: float = 0.2
    momentum: float = 0.9
    max_norm: float = 0.05
    global_batch: int = 16
    steps: int = 2


CONFIG = TrainConfig()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CharModel(nn.Module):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.mix = nn.Linear(config.context * config.width, config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.blocks))
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.mix(self.embedding(characters).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trainer:
    def __init__(self, model: nn.Module, config: TrainConfig, rank: Rank) -> None:
        self.config, self.rank = config, rank
        self.model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            use_orig_params=True,
            device_id=rank.device,
        )
        self.optimizer = make_optimizer(self.model.parameters())

    def my_rows(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        local = self.config.global_batch // self.rank.world_size
        first = step * self.config.global_batch + self.rank.rank * local
        return {name: rows[first : first + local] for name, rows in batch.items()}

    def train(self, batch: dict[str, Tensor]) -> None:
        for step in range(self.config.steps):
            self.optimizer.zero_grad(set_to_none=True)
            loss(self.model, self.my_rows(batch, step)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
            self.optimizer.step()


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=CONFIG.lr, momentum=CONFIG.momentum)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    rows = CONFIG.global_batch * CONFIG.steps
    text = torch.randint(CONFIG.vocabulary, (rows, CONFIG.context + 1), generator=generator)
    return {"characters": text[:, :-1], "following": text[:, -1]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["characters"]), batch["following"])


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model, CONFIG, rank).train(shard)


case = Case(
    model=lambda: CharModel(CONFIG),
    batch=make_batch,
    loss=loss,
    layout="1x2",
    shards="own",
    dtype=torch.float32,
)
options = {
    "compare": "update",
    "optimizer": make_optimizer,
    "clip": CONFIG.max_norm,
    "steps": CONFIG.steps,
}
