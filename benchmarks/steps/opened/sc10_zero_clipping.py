"""DDP with ZeroRedundancyOptimizer: every rank updates its partition and broadcasts it."""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SETTINGS = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}
MAX_NORM = 0.4
STEPS = 2
ROWS_PER_STEP = 12


def build():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 5)
    )


def dataset(generator):
    rows = STEPS * ROWS_PER_STEP
    return {
        "features": 2 * torch.randn(rows, 8, generator=generator),
        "labels": torch.randint(0, 5, (rows,), generator=generator),
    }


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["features"]), batch["labels"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, **SETTINGS)


def parameters_of(optimizer):
    for group in optimizer.param_groups:
        yield from group["params"]


class Engine:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)
        self.optimizer = ZeroRedundancyOptimizer(
            self.ddp.parameters(), optimizer_class=torch.optim.SGD, **SETTINGS
        )

    def clip(self):
        return nn.utils.clip_grad_norm_(parameters_of(self.optimizer.optim), MAX_NORM)

    def train_on(self, batch):
        self.optimizer.zero_grad()
        loss(self.ddp, batch).backward()
        self.clip()
        self.optimizer.step()


def rows_of(batch, number, rank):
    """The rows of this rank in the big batch ``number``."""
    own = ROWS_PER_STEP // rank.world_size
    start = number * ROWS_PER_STEP + rank.rank * own
    return {name: values[start : start + own] for name, values in batch.items()}


def step(model, batch, rank):
    engine = Engine(model)
    for number in range(STEPS):
        engine.train_on(rows_of(batch, number, rank))


case = Case(model=build, batch=dataset, loss=loss, layout="1x2", shards="own")
options = {
    "compare": "update",
    "optimizer": make_optimizer,
    "clip": MAX_NORM,
    "steps": STEPS,
}
