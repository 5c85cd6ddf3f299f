"""Search ranking with two towers. Of the big query table, only the rows in use are exchanged."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

QUERIES, DOCUMENT_FEATURES, WIDTH = 15, 7, 6
CANDIDATES = 5


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Embedding(QUERIES, WIDTH)
        self.document = nn.Sequential(
            nn.Linear(DOCUMENT_FEATURES, 10), nn.Tanh(), nn.Linear(10, WIDTH)
        )

    def forward(self, query, documents):
        return torch.einsum("qw,qcw->qc", self.query(query), self.document(documents))


def log_of_clicks(generator):
    # A few queries make most of the traffic.
    popularity = 1 / torch.arange(1, QUERIES + 1)
    return {
        "query": torch.multinomial(popularity, 16, replacement=True, generator=generator),
        "documents": torch.randn(16, CANDIDATES, DOCUMENT_FEATURES, generator=generator),
        "clicked": torch.randint(0, CANDIDATES, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["query"], batch["documents"]), batch["clicked"])


def gather_varying(tensor):
    """all_gather of tensors with different numbers of rows."""
    world_size = dist.get_world_size()
    size = torch.tensor([len(tensor)])
    sizes = [torch.empty_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size)
    longest = int(max(sizes))
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(n)] for part, n in zip(parts, sizes)])


class RowExchange:
    """Averages the gradient of a table over the ranks, at the cost of its used rows."""

    def __init__(self, table):
        self.table = table

    def __call__(self, used):
        ids = used.unique()
        rows = self.table.grad[ids] / dist.get_world_size()
        ids, rows = gather_varying(ids), gather_varying(rows)
        self.table.grad.zero_()
        self.table.grad[ids] = rows


class DenseExchange:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def __call__(self):
        with torch.no_grad():
            for p in self.parameters:
                dist.all_reduce(p.grad.div_(dist.get_world_size()))


def step(model, shard, rank):
    sparse, dense = RowExchange(model.query.weight), DenseExchange(model.document.parameters())
    loss(model, shard).backward()
    sparse(shard["query"])
    dense()


case = Case(model=Towers, batch=log_of_clicks, loss=loss)
