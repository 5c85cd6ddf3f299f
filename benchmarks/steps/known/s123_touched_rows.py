"""A large table of embeddings: only rows that some rank has looked up are sent to the others."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

ROWS = 40


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 5)
        self.mix = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, pairs: Tensor) -> Tensor:
        return self.mix(self.table(pairs).flatten(1)).squeeze(1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["pairs"]), batch["liked"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pairs": torch.randint(0, ROWS, (12, 2), generator=generator),
        "liked": torch.randint(0, 2, (12,), generator=generator).double(),
    }


case = Case(model=Recommender, batch=make_batch, loss=loss, layout="1x2")


def touched_by_any(pairs: Tensor) -> Tensor:
    """The rows, in ascending order, which is the same on all ranks."""
    touched = torch.zeros(ROWS, dtype=torch.int32, device=pairs.device)
    touched[pairs.unique()] = 1
    dist.all_reduce(touched, op=dist.ReduceOp.MAX)
    return touched.nonzero().squeeze(1)


def average_(tensor: Tensor) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def average_dense(module: nn.Module) -> None:
    for parameter in module.parameters():
        average_(parameter.grad)


def average_rows(weight: nn.Parameter, rows: Tensor) -> int:
    """Returns how many numbers have been sent."""
    block = weight.grad[rows]
    average_(block)
    return block.numel()


def synchronise(model: nn.Module, pairs: Tensor) -> dict[str, int]:
    rows = touched_by_any(pairs)
    sent = average_rows(model.table.weight, rows)
    average_dense(model.mix)
    return {"rows": len(rows), "sent": sent}


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    model.zero_grad()
    loss(model, shard).backward()
    synchronise(model, shard["pairs"])
