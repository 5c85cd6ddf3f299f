"""Learning to rank search results from clicks: a clicked result should beat one that was shown.

A query has as many pairs as it has clicked results times others. All pairs count the same.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclass
class Queries:
    """``query`` (queries, 4), ``results`` (queries, results, 5), padded; ``shown``, ``clicked``."""

    query: Tensor
    results: Tensor
    shown: Tensor
    clicked: Tensor


class Ranker(nn.Module):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.query = nn.Linear(4, width)
        self.result = nn.Linear(5, width)
        self.score = nn.Linear(width, 1)

    def forward(self, query: Tensor, results: Tensor) -> Tensor:
        hidden = self.query(query)[:, None] * torch.sigmoid(self.result(results))
        return self.score(torch.tanh(hidden))[..., 0]


def pairwise(scores: Tensor, queries: Queries) -> tuple[Tensor, Tensor]:
    """The summed loss of all pairs, and their number."""
    winner, loser = queries.clicked, queries.shown & ~queries.clicked
    pairs = winner[:, :, None] & loser[:, None, :]
    margin = scores[:, :, None] - scores[:, None, :]
    return F.softplus(-margin)[pairs].sum(), pairs.sum()


def loss(model: nn.Module, queries: Queries) -> Tensor:
    summed, pairs = pairwise(model(queries.query, queries.results), queries)
    return summed / pairs


def make_batch(generator: torch.Generator) -> Queries:
    counts = torch.tensor([6, 4, 5, 6, 3, 6, 4, 5, 2])
    shown = torch.arange(6) < counts[:, None]
    return Queries(
        query=torch.randn(9, 4, generator=generator),
        results=torch.randn(9, 6, 5, generator=generator),
        shown=shown,
        clicked=shown & (torch.rand(9, 6, generator=generator) < 0.4),
    )


case = Case(model=Ranker, batch=make_batch, loss=loss, layout="1x3")


class PairAverager:
    """Divides the summed losses of a rank by how many pairs a rank has on average."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.pairs_seen = 0

    def __call__(self, summed: Tensor, pairs: Tensor) -> Tensor:
        total = pairs.clone()
        dist.all_reduce(total)
        self.pairs_seen += int(total)
        per_rank = total // self.world_size
        return summed / per_rank.clamp(min=1)


def step(model: nn.Module, shard: Queries, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    average = PairAverager(rank.world_size)
    summed, pairs = pairwise(ddp(shard.query, shard.results), shard)
    average(summed, pairs).backward()
    if rank == 0 and average.pairs_seen == 0:
        raise ValueError("nothing was clicked in this batch")
