"""Learning to rank with ListNet.  A schedule object says what to do at each micro-batch."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LISTS, ITEMS, FEATURES = 16, 5, 6


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 18)
        self.second = nn.Linear(18, 1)

    def forward(self, items):
        return self.second(self.first(items).sigmoid()).squeeze(-1)


def lists(g):
    return {
        "items": torch.randn(LISTS, ITEMS, FEATURES, generator=g),
        "grades": torch.randint(0, 4, (LISTS, ITEMS), generator=g),
    }


def listnet(scores, grades):
    wanted = grades.to(scores.dtype).softmax(-1)
    return -(wanted * scores.log_softmax(-1)).sum(-1)


def loss(model, batch):
    return listnet(model(batch["items"]), batch["grades"]).mean()


@dataclass
class Schedule:
    window: int = 4
    boost: float = 1.0
    position: int = field(default=0, init=False)

    @property
    def synchronises(self):
        return self.position % self.window == 0

    @property
    def factor(self):
        return self.boost / self.window

    def advance(self):
        self.position += 1


class Loop:
    def __init__(self, model, options):
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        self.schedule = Schedule(options.window, options.boost)

    def backward(self, micro):
        value = loss(self.ddp, micro) * self.schedule.factor
        value.backward()

    def run(self, micro_batches):
        for micro in micro_batches:
            if self.schedule.synchronises:
                self.backward(micro)
            else:
                with self.ddp.no_sync():
                    self.backward(micro)
            self.schedule.advance()


def micro_batches(shard, count):
    return [
        {"items": items, "grades": grades}
        for items, grades in zip(shard["items"].chunk(count), shard["grades"].chunk(count))
    ]


OPTIONS = SimpleNamespace(window=4, boost=2.0)


def step(model, shard, rank):
    Loop(model, OPTIONS).run(micro_batches(shard, OPTIONS.window))


case = Case(model=Scorer, batch=lists, loss=loss, layout="1x2")
