"""ZeRO-1 loop that scales the learning rate with the loss, like a reactive LR schedule."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 0.02
    momentum: float = 0.9
    smoothing: float = 0.5
    steps: int = 3


CFG = OptimConfig()


class ReactiveLR:
    """Sets lr = base * loss / (loss + smoothed loss): large while the loss is above its average."""

    def __init__(self, optimizer, cfg: OptimConfig):
        self.optimizer = optimizer
        self.cfg = cfg
        self.average = None

    def observe(self, metric: float):
        keep = self.cfg.smoothing
        self.average = metric if self.average is None else keep * self.average + (1 - keep) * metric
        for group in self.optimizer.param_groups:
            group["lr"] = 2 * self.cfg.lr * metric / (metric + self.average)


def build_model():
    return nn.Sequential(
        nn.Linear(6, 14), nn.Tanh(), nn.Linear(14, 14), nn.Tanh(), nn.Linear(14, 1)
    )


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["features"]).squeeze(-1), batch["target"])


class Loop:
    """The same loop in one process and on many ranks; a strategy makes it parallel."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.schedule = ReactiveLR(optimizer, CFG)

    def metric(self, value):
        return value.detach().item()

    def run_batch(self, batch):
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.schedule.observe(self.metric(value))
        self.optimizer.step()


class ZeroLoop(Loop):
    def __init__(self, model):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(),
            optimizer_class=torch.optim.SGD,
            lr=CFG.lr,
            momentum=CFG.momentum,
        )
        super().__init__(ddp, optimizer)
        self.history = []

    def metric(self, value):
        mean = value.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        self.history.append(mean.item())  # what the progress bar shows
        return value.item()

    def fit(self, batch):
        size = len(batch["target"]) // CFG.steps
        for features, target in zip(batch["features"].split(size), batch["target"].split(size)):
            self.run_batch({"features": features, "target": target})


def one_device(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=CFG.lr, momentum=CFG.momentum)
    return Loop(model, optimizer).run_batch


def make_batch(generator):
    features = torch.randn(24, 6, generator=generator)
    noise = torch.randn(24, generator=generator)
    return {"features": features, "target": features.square().sum(-1) * 0.5 + noise}


def step(model, shard, rank):
    trained = copy.deepcopy(model)
    ZeroLoop(trained).fit(shard)
    return dict(trained.named_parameters())


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
options = {"compare": "update", "reference": one_device, "steps": CFG.steps}
