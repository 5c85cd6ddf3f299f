"""A builder that puts together mesh, sharded model and optimizer from one config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class Config:
    inputs: int = 10
    width: int = 12
    depth: int = 2
    classes: int = 5
    lr: float = 0.1
    betas: tuple[float, float] = (0.8, 0.9)
    steps: int = 2
    batch: int = 16

    def optimizer(self, parameters) -> Optimizer:
        return torch.optim.Adam(parameters, lr=self.lr, betas=self.betas, eps=1e-2)


class Dense(nn.Module):
    """Takes all features that came before it, and adds some."""

    def __init__(self, size: int, more: int) -> None:
        super().__init__()
        self.compress = nn.Linear(size, more)
        self.expand = nn.Linear(more, more)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.expand(self.compress(x).relu())], dim=-1)


class DenseNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = nn.Linear(config.inputs, config.width)
        sizes = [config.width + 4 * number for number in range(config.depth + 1)]
        self.blocks = nn.Sequential(*(Dense(size, 4) for size in sizes[:-1]))
        self.head = nn.Linear(sizes[-1], config.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).tanh()))


class Builder:
    def __init__(self, config: Config, world_size: int) -> None:
        self.config = config
        self.mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    def build(self, model: DenseNet) -> tuple[nn.Module, Optimizer]:
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        optimizer = self.config.optimizer(model.parameters())
        fully_shard(model, mesh=self.mesh)
        return model, optimizer


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: list[dict[str, Tensor]],
    objective: Callable[[nn.Module, dict[str, Tensor]], Tensor],
) -> None:
    for batch in batches:
        optimizer.zero_grad()
        objective(model, batch).backward()
        optimizer.step()


CONFIG = Config()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    rows = CONFIG.steps * CONFIG.batch
    return {
        "x": torch.randn(rows, CONFIG.inputs, generator=generator),
        "label": torch.randint(CONFIG.classes, (rows,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"])


def step(model: DenseNet, batch: dict[str, Tensor], rank: Rank) -> None:
    sharded, optimizer = Builder(CONFIG, rank.world_size).build(model)
    big = [
        {name: part[at : at + CONFIG.batch] for name, part in batch.items()}
        for at in range(0, CONFIG.steps * CONFIG.batch, CONFIG.batch)
    ]
    mine = [{name: part[rank.rank :: rank.world_size] for name, part in one.items()} for one in big]
    train(sharded, optimizer, mine, loss)


case = Case(
    model=lambda: DenseNet(CONFIG), batch=make_batch, loss=loss, layout="1x2", shards="own"
)
options = {"compare": "update", "optimizer": CONFIG.optimizer, "steps": CONFIG.steps}
