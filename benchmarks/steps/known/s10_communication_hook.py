"""DDP with a communication hook of its own, which takes its settings from the environment."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class SmallConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(3, 6, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
        )
        self.classifier = nn.Linear(24, 4)

    def forward(self, signals):
        return self.classifier(self.features(signals).flatten(1))


def loss(model, batch):
    return F.cross_entropy(model(batch["signals"]), batch["labels"])


def make_batch(generator):
    return {
        "signals": torch.randn(12, 3, 8, generator=generator),
        "labels": torch.randint(0, 4, (12,), generator=generator),
    }


case = Case(model=SmallConv, batch=make_batch, loss=loss, layout="2x2")


@dataclass
class HookState:
    group: dist.ProcessGroup
    num_workers: int
    buckets: int = 0


def averaging_hook(state, bucket):
    state.buckets += 1
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)

    def average(future):
        return future.value()[0].div_(state.num_workers)

    return work.get_future().then(average)


def prepare(model):
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    state = HookState(
        group=dist.group.WORLD,
        num_workers=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    ddp.register_comm_hook(state, averaging_hook)
    return ddp


def step(model, shard, rank):
    ddp = prepare(model)
    ddp.zero_grad()
    loss(ddp, shard).backward()
