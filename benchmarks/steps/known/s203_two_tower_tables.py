"""A two-tower recommender. Its embedding tables exchange only the rows that were looked up.

DistributedDataParallel averages the dense layers, and is told to leave the tables alone.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
TABLES = ("user", "item")


class TwoTowers(nn.Module):
    def __init__(self, users: int = 11, items: int = 17, width: int = 5) -> None:
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=True)
        self.item = nn.Embedding(items, width, sparse=True)
        self.item_text = nn.Linear(4, width)
        self.merge = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))

    def forward(self, user: Tensor, item: Tensor, text: Tensor) -> Tensor:
        described = self.merge(self.item(item) + self.item_text(text))
        return (self.user(user) * described).sum(-1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["user"], batch["item"], batch["text"])
    return F.binary_cross_entropy_with_logits(scores, batch["clicked"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "user": torch.randint(11, (16,), generator=generator),
        "item": torch.randint(17, (16,), generator=generator),
        "text": torch.randn(16, 4, generator=generator),
        "clicked": torch.randint(2, (16,), generator=generator).double(),
    }


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="1x2")


def table_parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.startswith(TABLES)]


def gathered(values: Tensor) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


class RowExchange:
    """Gives every rank the gradients of the rows that any rank has looked up."""

    def __init__(self, model: nn.Module) -> None:
        self.tables = [getattr(model, name) for name in TABLES]

    @torch.no_grad()
    def average(self) -> None:
        for table in self.tables:
            gradient = table.weight.grad
            rows = gathered(gradient._indices()[0])
            values = gathered(gradient._values()) / dist.get_world_size()
            table.weight.grad = torch.zeros_like(table.weight).index_add_(0, rows, values)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        DDP._set_params_and_buffers_to_ignore_for_model(model, table_parameters(model))
        self.ddp = DDP(model)
        self.exchange = RowExchange(model)

    def train_on(self, batch: Batch) -> float:
        value = loss(self.ddp, batch)
        value.backward()
        self.exchange.average()
        return value.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Trainer(model).train_on(shard)
