"""A click model: ranks exchange only those rows of the item table that have a gradient."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

ITEMS = 40
Batch = dict[str, Tensor]


class ClickModel(nn.Module):
    """The mean of the items in the history, and the item that is offered."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, 6, sparse=True)
        self.tower = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 1))

    def forward(self, history: Tensor, offered: Tensor) -> Tensor:
        profile = self.items(history).mean(1)
        return self.tower(torch.cat([profile, self.items(offered)], dim=1)).squeeze(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["history"], batch["offered"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def make_batch(generator: torch.Generator) -> Batch:
    popularity = 1 / torch.arange(1.0, ITEMS + 1)
    history = torch.multinomial(popularity, 16 * 3, replacement=True, generator=generator)
    return {
        "history": history.view(16, 3),
        "offered": torch.randint(ITEMS, (16,), generator=generator),
        "clicked": torch.randint(2, (16,), generator=generator).float(),
    }


case = Case(model=ClickModel, batch=make_batch, loss=loss, layout="1x4")


class RowExchange:
    """Averages a sparse gradient: every rank sends its row numbers and its rows."""

    def __init__(self, table: nn.Parameter, world_size: int) -> None:
        self.table = table
        self.world_size = world_size

    def gather(self) -> list[tuple[Tensor, Tensor]]:
        gradient = self.table.grad.coalesce()
        own = (gradient.indices()[0].cpu(), gradient.values().cpu())
        received: list = [None] * self.world_size
        dist.all_gather_object(received, own)
        return received

    def run(self) -> None:
        mean = torch.zeros_like(self.table, device="cpu")
        for numbers, rows in self.gather():
            mean[numbers] = rows / self.world_size
        self.table.grad = mean.to(self.table.device)


def average_dense(parameters: list[nn.Parameter], world_size: int) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def step(model: ClickModel, shard: Batch, rank: Rank) -> None:
    model.zero_grad()
    loss(model, shard).backward()
    average_dense(list(model.tower.parameters()), rank.world_size)
    RowExchange(model.items.weight, rank.world_size).run()
