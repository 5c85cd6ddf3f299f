"""Click prediction: sparse gradients of hashed embedding tables are exchanged in fixed buffers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

BUCKETS, WIDTH, TAGS, DENSE, EXAMPLES = 32, 5, 3, 4, 16


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tags = nn.Embedding(BUCKETS, WIDTH, sparse=True)
        self.users = nn.Embedding(BUCKETS, WIDTH, sparse=True)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH + DENSE, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        tags = self.tags(batch["tags"]).sum(1)
        users = self.users(batch["user"])
        return self.top(torch.cat([tags, users, batch["dense"]], dim=1)).squeeze(1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch["clicked"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tags": torch.randint(BUCKETS, (EXAMPLES, TAGS), generator=generator),
        "user": torch.randint(BUCKETS, (EXAMPLES,), generator=generator),
        "dense": torch.randn(EXAMPLES, DENSE, generator=generator),
        "clicked": torch.rand(EXAMPLES, generator=generator).round(),
    }


class SparseExchange:
    """all_gather needs equal shapes, so rows travel in buffers with room for all buckets."""

    def __init__(self, capacity: int, width: int, dtype: torch.dtype) -> None:
        self.world = dist.get_world_size()
        self.rows = torch.zeros(capacity, dtype=torch.long)
        self.values = torch.zeros(capacity, width, dtype=dtype)

    def fill(self, grad: Tensor) -> None:
        grad = grad.coalesce()
        count = grad._nnz()
        self.rows[:count] = grad.indices()[0]
        self.values[:count] = grad.values()

    def gather(self) -> tuple[Tensor, Tensor]:
        rows = [torch.empty_like(self.rows) for _ in range(self.world)]
        values = [torch.empty_like(self.values) for _ in range(self.world)]
        dist.all_gather(rows, self.rows)
        dist.all_gather(values, self.values)
        return torch.cat(rows), torch.cat(values)

    def average(self, grad: Tensor) -> Tensor:
        self.fill(grad)
        rows, values = self.gather()
        total = torch.sparse_coo_tensor(rows.unsqueeze(0), values, grad.shape)
        return (total / self.world).coalesce()


class Trainer:
    def __init__(self, model: ClickModel) -> None:
        self.model = model
        weight = model.tags.weight
        self.exchange = SparseExchange(BUCKETS, WIDTH, weight.dtype)

    def train(self, batch: dict[str, Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        loss(self.model, batch).backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad.is_sparse:
                    parameter.grad = self.exchange.average(parameter.grad)
                else:
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(self.exchange.world)


case = Case(model=ClickModel, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    Trainer(model).train(shard)
