"""Two-tower retrieval: queries against the items of all ranks, with log-Q correction."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class Config:
    users: int = 50
    items: int = 40
    dim: int = 12
    temperature: float = 0.2
    batch_size: int = 16
    gpus: int = 8  # one node of the training cluster

    @property
    def per_gpu_batch_size(self) -> int:
        return self.batch_size // self.gpus


cfg = Config()


class Tower(nn.Module):
    def __init__(self, ids, dim):
        super().__init__()
        self.table = nn.Embedding(ids, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, ids):
        return nn.functional.normalize(self.mlp(self.table(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = Tower(cfg.users, cfg.dim)
        self.candidate = Tower(cfg.items, cfg.dim)

    def forward(self, user_ids, item_ids):
        return self.query(user_ids), self.candidate(item_ids)


def clicks(generator):
    popularity = torch.rand(cfg.items, generator=generator) + 0.05
    popularity /= popularity.sum()
    items = torch.multinomial(popularity, cfg.batch_size, generator=generator)
    return {
        "user": torch.randint(cfg.users, (cfg.batch_size,), generator=generator),
        "item": items,
        "log_q": popularity[items].log(),
    }


class InBatchSoftmax:
    """Softmax over all items of the batch. Rows of other ranks are negatives, too."""

    def __init__(self, gather=lambda x: x, first_row=0):
        self.gather = gather
        self.first_row = first_row

    def __call__(self, model, batch):
        queries, items = model(batch["user"], batch["item"])
        logits = queries @ self.gather(items).T / cfg.temperature
        logits = logits - self.gather(batch["log_q"])
        positives = self.first_row + torch.arange(len(queries))
        return nn.functional.cross_entropy(logits, positives)


loss = InBatchSoftmax()
case = Case(model=TwoTower, batch=clicks, loss=loss, layout="2x2")


def all_rows(x):
    if x.requires_grad:
        return torch.cat(dist_nn.all_gather(x))
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    first_row = rank.rank * cfg.per_gpu_batch_size
    InBatchSoftmax(all_rows, first_row)(ddp, shard).backward()
