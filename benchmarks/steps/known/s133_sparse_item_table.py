"""A recommender with a large table of items, whose gradients are sparse.

The dense layers are averaged as usual. Of the table, only the touched rows are exchanged.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

ITEMS = 40

Batch = dict[str, Tensor]


class Recommender(nn.Module):
    """Will the user click on the candidate, given the items seen before?"""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, width, sparse=True)
        self.user = nn.Linear(width, width)
        self.score = nn.Linear(2 * width, 1)

    def forward(self, seen: Tensor, candidate: Tensor) -> Tensor:
        user = torch.relu(self.user(self.items(seen).mean(1)))
        both = torch.cat([user, self.items(candidate)], dim=-1)
        return self.score(both).squeeze(-1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["seen"], batch["candidate"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def make_batch(generator: torch.Generator) -> Batch:
    popular = torch.linspace(3.0, 0.1, ITEMS).expand(16, -1)
    return {
        "seen": torch.multinomial(popular, 4, generator=generator),
        "candidate": torch.randint(ITEMS, (16,), generator=generator),
        "clicked": torch.randint(2, (16,), generator=generator).double(),
    }


case = Case(model=Recommender, batch=make_batch, loss=loss, layout="1x4")


class Exchange:
    """Averages gradients over the ranks, sparse ones row by row."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = model
        self.world_size = world_size

    def dense(self, grad: Tensor) -> Tensor:
        dist.all_reduce(grad)
        return grad / self.world_size

    def sparse(self, grad: Tensor) -> Tensor:
        grad = grad.coalesce()
        rows: list[tuple[Tensor, Tensor]] = [(grad, grad)] * self.world_size
        dist.all_gather_object(rows, (grad.indices()[0].cpu(), grad.values().cpu()))
        total = torch.zeros(grad.shape, dtype=grad.dtype)
        for indices, values in rows:
            total[indices] = values
        return total.to(grad.device) / self.world_size

    def run(self) -> None:
        for parameter in self.model.parameters():
            grad = parameter.grad
            assert grad is not None
            parameter.grad = self.sparse(grad) if grad.is_sparse else self.dense(grad)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    exchange = Exchange(model, rank.world_size)
    model.zero_grad(set_to_none=True)
    loss(model, shard).backward()
    exchange.run()
