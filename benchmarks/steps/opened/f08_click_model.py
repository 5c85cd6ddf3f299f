"""Position-based click model, trained on logged result pages with a shuffling batch sampler."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case


@dataclass(frozen=True)
class ClickConfig:
    pages: int = 20
    positions: int = 5
    features: int = 4
    base_seed: int = 17
    epoch: int = 3


CFG = ClickConfig()


class PositionBasedModel(nn.Module):
    """A result is clicked if it is examined (position) and attractive (features)."""

    def __init__(self, cfg=CFG):
        super().__init__()
        self.examination = nn.Parameter(torch.linspace(1.5, -1.5, cfg.positions))
        self.attraction = nn.Sequential(nn.Linear(cfg.features, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, features):
        attraction = self.attraction(features).squeeze(-1)
        return F.logsigmoid(attraction) + F.logsigmoid(self.examination)


def click_loss(model, batch):
    log_click = model(batch["features"])
    log_skip = torch.log1p(-log_click.exp() + 1e-9)
    clicks = batch["clicks"]
    return -(clicks * log_click + (1 - clicks) * log_skip).mean()


class ResultPages(Dataset):
    def __init__(self, batch):
        self.columns = batch

    def __len__(self):
        return len(self.columns["clicks"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


class RandomState:
    """All random numbers of the data pipeline come from here."""

    def __init__(self, base_seed, rank):
        self.base_seed = base_seed
        self.rank = rank

    def generator(self, epoch):
        return torch.Generator().manual_seed(self.base_seed + 1000 * epoch + self.rank)


class ShardedBatchSampler(Sampler):
    def __init__(self, size, rank, state, batch_size):
        self.size = size
        self.rank = rank
        self.state = state
        self.batch_size = batch_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.size, generator=self.state.generator(self.epoch)).tolist()
        mine = order[self.rank.rank :: self.rank.world_size]
        for start in range(0, len(mine), self.batch_size):
            yield mine[start : start + self.batch_size]

    def __len__(self):
        return -(-self.size // (self.rank.world_size * self.batch_size))


def train_epoch(ddp, pages, rank, cfg=CFG):
    state = RandomState(cfg.base_seed, rank.rank)
    sampler = ShardedBatchSampler(len(pages), rank, state, cfg.pages // rank.world_size)
    sampler.set_epoch(cfg.epoch)
    for batch in DataLoader(pages, batch_sampler=sampler):
        click_loss(ddp, batch).backward()


def make_batch(generator, cfg=CFG):
    features = torch.randn(cfg.pages, cfg.positions, cfg.features, generator=generator)
    chance = torch.linspace(0.7, 0.2, cfg.positions)
    clicks = torch.rand(cfg.pages, cfg.positions, generator=generator) < chance
    return {"features": features, "clicks": clicks.to(features.dtype)}


case = Case(
    model=PositionBasedModel, batch=make_batch, loss=click_loss, layout="2x2", shards="own"
)


def step(model, batch, rank):
    ddp = DistributedDataParallel(model)
    train_epoch(ddp, ResultPages(batch), rank)
