"""Local SGD strategy: gradients are reduced in a node, weights are averaged between the nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from ddp_equivalence import Case


@dataclass(frozen=True)
class Schedule:
    lr: float = 0.1
    warmup_steps: int = 3
    total_steps: int = 4
    local_sgd_start: int = 1
    averaging_period: int = 1


SCHEDULE = Schedule()


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6 + 4, 9)
        self.score = nn.Linear(9, 1)

    def forward(self, item, context):
        joined = torch.cat([self.items(item), context], dim=-1)
        return self.score(torch.relu(self.hidden(joined))).squeeze(-1)


def warmup(step):
    return min(1.0, (step + 1) / SCHEDULE.warmup_steps)


def build_optimizer(parameters):
    optimizer = torch.optim.SGD(parameters, lr=SCHEDULE.lr)
    return [optimizer, LambdaLR(optimizer, warmup)]


class LocalSGDStrategy:
    def __init__(self, schedule: Schedule, rank):
        self.schedule = schedule
        self.node_group, _ = dist.new_subgroups(group_size=rank.local_world_size)

    def setup(self, model):
        ddp = DistributedDataParallel(model)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=self.node_group,
            start_localSGD_iter=self.schedule.local_sgd_start,
        )
        ddp.register_comm_hook(state, post_localSGD_hook)
        return ddp

    def setup_optimizer(self, optimizer):
        averager = PeriodicModelAverager(
            period=self.schedule.averaging_period,
            warmup_steps=self.schedule.warmup_steps,
        )
        return PostLocalSGDOptimizer(optim=optimizer, averager=averager)


class Trainer:
    def __init__(self, model, strategy):
        self.model = strategy.setup(model)
        inner, self.scheduler = build_optimizer(self.model.parameters())
        self.optimizer = strategy.setup_optimizer(inner)

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            loss(self.model, batch).backward()
            self.optimizer.step()
            self.scheduler.step()


def make_batch(generator):
    rows = 8 * SCHEDULE.total_steps
    return {
        "item": torch.randint(0, 11, (rows,), generator=generator),
        "context": torch.randn(rows, 4, generator=generator),
        "clicked": torch.rand(rows, generator=generator),
    }


def loss(model, batch):
    logits = model(batch["item"], batch["context"])
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["clicked"])


def step(model, shard, rank):
    size = len(shard["item"]) // SCHEDULE.total_steps
    pieces = zip(*(value.split(size) for value in shard.values()))
    trainer = Trainer(model, LocalSGDStrategy(SCHEDULE, rank))
    trainer.fit(dict(zip(shard, piece)) for piece in pieces)


case = Case(model=Scorer, batch=make_batch, loss=loss, layout="2x2")
options = {
    "compare": "update",
    "optimizer": build_optimizer,
    "steps": SCHEDULE.total_steps,
}
