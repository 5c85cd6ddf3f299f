"""Item embeddings for retrieval: sparse gradients of the tables, dense ones of the towers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

ITEMS, USERS, HISTORY, EXAMPLES, WIDTH = 30, 12, 4, 16, 6

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TwoTowerConfig:
    width: int = WIDTH
    margin: float = 1.0
    sparse: bool = True


class TwoTower(nn.Module):
    def __init__(self, config: TwoTowerConfig | None = None) -> None:
        super().__init__()
        config = config or TwoTowerConfig()
        self.items = nn.Embedding(ITEMS, config.width, sparse=config.sparse)
        self.users = nn.Embedding(USERS, config.width, sparse=config.sparse)
        self.user_tower = nn.Sequential(
            nn.Linear(2 * config.width, config.width), nn.Tanh(), nn.Linear(config.width, WIDTH)
        )
        self.item_tower = nn.Linear(config.width, WIDTH)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The vectors of users, of items they chose, and of items they saw and left."""
        columns = [batch["history"], batch["chosen"].unsqueeze(1), batch["skipped"].unsqueeze(1)]
        rows = self.items(torch.cat(columns, dim=1))
        history, chosen, skipped = rows.split([HISTORY, 1, 1], dim=1)
        profile = torch.cat([self.users(batch["user"]), history.mean(dim=1)], dim=-1)
        user = self.user_tower(profile)
        return user, self.item_tower(chosen.squeeze(1)), self.item_tower(skipped.squeeze(1))


def make_batch(generator: torch.Generator) -> Batch:
    def items(*shape: int) -> Tensor:
        return torch.randint(ITEMS, (EXAMPLES, *shape), generator=generator)

    return {
        "user": torch.randint(USERS, (EXAMPLES,), generator=generator),
        "history": items(HISTORY),
        "chosen": items(),
        "skipped": items(),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    user, chosen, skipped = model(batch)
    gap = (user * chosen).sum(dim=-1) - (user * skipped).sum(dim=-1)
    return F.softplus(TwoTowerConfig().margin - gap).mean()


class GradientExchange:
    """Averages gradients; of a table, only the rows that were looked up travel."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.size = dist.get_world_size()

    def exchange_dense(self, param: Tensor) -> None:
        dist.all_reduce(param.grad)
        param.grad.div_(self.size)

    def exchange_sparse(self, param: Tensor) -> None:
        gradient = param.grad
        rows, values = gradient._indices(), gradient._values()
        dist.all_reduce(values)
        values = values / self.size
        total = torch.sparse_coo_tensor(rows, values, gradient.shape)
        param.grad = total.to_dense()  # the optimizer of this project is dense

    def __call__(self) -> None:
        for param in self.params:
            if param.grad.is_sparse:
                self.exchange_sparse(param)
            else:
                self.exchange_dense(param)


class TwoTowerTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.exchange = GradientExchange(model)

    def train_step(self, batch: Batch) -> float:
        value = loss(self.model, batch)
        value.backward()
        self.exchange()
        return value.item()


case = Case(model=TwoTower, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    TwoTowerTrainer(model).train_step(shard)
