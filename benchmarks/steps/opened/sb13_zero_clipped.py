"""ZeroRedundancyOptimizer with a clipping helper that works for any optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_equivalence import Case, Rank

MAX_NORM = 0.1


class GatedRegressor(nn.Module):
    def __init__(self, size: int = 7, hidden: int = 11) -> None:
        super().__init__()
        self.value = nn.Linear(size, hidden)
        self.gate = nn.Linear(size, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.value(x) * self.gate(x).sigmoid()))


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(24, 7, generator=generator)
    y = torch.stack([x[:, :3].prod(1), x.norm(dim=1)], dim=1)
    return {"x": x, "y": y}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups that have a gradient."""
    found = [one for group in optimizer.param_groups for one in group["params"]]
    return [one for one in found if one.grad is not None]


class Engine:
    """Hides from the loop which optimizer there is."""

    def __init__(self, model: nn.Module, sharded_states: bool) -> None:
        self.ddp = DistributedDataParallel(model)
        if sharded_states:
            self.optimizer: Optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.SGD, lr=0.5, momentum=0.9
            )
        else:
            self.optimizer = sgd(model.parameters())

    def inner_optimizer(self) -> Optimizer:
        """The optimizer that does the work: ZeRO is a shell around another one."""
        return getattr(self.optimizer, "optim", self.optimizer)

    def clip(self) -> None:
        parameters = stepped_by(self.inner_optimizer())
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)

    def step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.ddp, batch).backward()
        self.clip()
        self.optimizer.step()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    engine = Engine(model, sharded_states=rank.world_size > 1)
    engine.step(shard)


case = Case(model=GatedRegressor, batch=rows, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": sgd, "clip": MAX_NORM}
