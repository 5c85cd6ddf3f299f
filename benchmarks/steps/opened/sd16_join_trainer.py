"""Trainer for ranks whose data sets have different lengths, with DDP's join."""

from dataclasses import asdict, dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_equivalence import Case

ROWS_PER_RANK = (8, 4)


@dataclass
class JoinConfig:
    enable: bool = True
    divide_by_initial_world_size: bool = True
    throw_on_early_termination: bool = False


@dataclass
class FitConfig:
    batch_size: int = 2
    lr: float = 0.05
    momentum: float = 0.8
    join: JoinConfig = field(default_factory=JoinConfig)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(5, 10), nn.Softplus(), nn.Linear(10, 10))
        self.out = nn.Linear(10, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.features(x))).squeeze(-1)


def make_optimizer(parameters, cfg):
    return torch.optim.SGD(parameters, lr=cfg.lr, momentum=cfg.momentum)


def batch_loss(model, x, y):
    return nn.functional.huber_loss(model(x), y)


class UnevenTrainer:
    def __init__(self, model, cfg: FitConfig):
        self.cfg = cfg
        self.model = DistributedDataParallel(model)
        self.optimizer = make_optimizer(self.model.parameters(), cfg)
        self.seen = 0

    def train_dataloader(self, rows):
        return DataLoader(TensorDataset(rows["x"], rows["y"]), self.cfg.batch_size, shuffle=False)

    def training_step(self, x, y):
        self.optimizer.zero_grad()
        batch_loss(self.model, x, y).backward()
        self.optimizer.step()
        self.seen += len(x)

    def fit(self, rows):
        with self.model.join(**asdict(self.cfg.join)):
            for x, y in self.train_dataloader(rows):
                self.training_step(x, y)


def loss(model, batch):
    return batch_loss(model, batch["x"], batch["y"])


def one_device(model, batch):
    """Each step takes the next rows of all ranks that have rows left."""
    cfg = FitConfig()
    optimizer = make_optimizer(model.parameters(), cfg)
    x = [part.split(cfg.batch_size) for part in batch["x"].split(ROWS_PER_RANK)]
    y = [part.split(cfg.batch_size) for part in batch["y"].split(ROWS_PER_RANK)]
    for number in range(max(map(len, x))):
        optimizer.zero_grad()
        rows = torch.cat([part[number] for part in x if number < len(part)])
        targets = torch.cat([part[number] for part in y if number < len(part)])
        batch_loss(model, rows, targets).backward()
        optimizer.step()


def make_batch(generator):
    x = torch.randn(sum(ROWS_PER_RANK), 5, generator=generator)
    return {"x": x, "y": 2 * x.sum(-1) + torch.randn(len(x), generator=generator)}


def step(model, shard, rank):
    UnevenTrainer(model, FitConfig()).fit(shard)


case = Case(
    model=Ranker,
    batch=make_batch,
    loss=loss,
    layout="1x2",
    shards="+".join(map(str, ROWS_PER_RANK)),
)
options = {"compare": "update", "reference": one_device}
