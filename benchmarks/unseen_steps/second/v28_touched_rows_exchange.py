"""A click model with a large table: only the rows that a rank touched are sent to the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ITEMS, WIDTH, DENSE, HISTORY, EXAMPLES = 30, 4, 3, 5, 24


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean")
        self.dense = nn.Linear(DENSE, WIDTH)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, history, dense):
        x = torch.cat([self.table(history), self.dense(dense)], dim=-1)
        return self.top(x).squeeze(-1)


def loss(model, batch):
    logits = model(batch["history"], batch["dense"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def make_batch(generator):
    popularity = 1 / torch.arange(1, ITEMS + 1)
    draws = torch.multinomial(popularity, EXAMPLES * HISTORY, True, generator=generator)
    return {
        "history": draws.view(EXAMPLES, HISTORY),
        "dense": torch.randn(EXAMPLES, DENSE, generator=generator),
        "clicked": torch.randint(2, (EXAMPLES,), generator=generator).float(),
    }


case = Case(model=ClickModel, batch=make_batch, loss=loss, layout="1x3")


def gather_uneven(tensor, world_size):
    """Concatenates tensors whose first dimensions differ from rank to rank."""
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([tensor.size(0)]))
    longest = int(max(sizes))
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: tensor.size(0)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes)])


class TableSync:
    """Exchanges (row, gradient) pairs instead of the whole table."""

    def __init__(self, table, world_size):
        self.table, self.world_size = table, world_size

    def reduce(self, touched):
        grad = self.table.weight.grad
        rows = touched.unique()
        all_rows = gather_uneven(rows, self.world_size)
        all_values = gather_uneven(grad[rows], self.world_size)
        grad.zero_()
        grad[all_rows] += all_values
        grad.div_(self.world_size)


def reduce_dense(parameters, world_size):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def step(model, shard, rank):
    loss(model, shard).backward()
    TableSync(model.table, rank.world_size).reduce(shard["history"])
    table = {id(parameter) for parameter in model.table.parameters()}
    reduce_dense((p for p in model.parameters() if id(p) not in table), rank.world_size)
