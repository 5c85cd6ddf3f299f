"""Own communication hook, which times the buckets: the average is taken after the sum has arrived."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Stopwatch:
    """State of the hook."""

    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        self.began = {}
        self.seconds = {}

    def start(self, bucket):
        self.began[bucket.index()] = time.perf_counter()

    def stop(self, index):
        self.seconds[index] = time.perf_counter() - self.began.pop(index)


def timed_average(state: Stopwatch, bucket: dist.GradBucket):
    index, final = bucket.index(), bucket.is_last()
    state.start(bucket)
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)

    def arrived(future):
        (total,) = future.value()
        state.stop(index)
        if final:
            report(state)
            return total
        return total.div_(state.group.size())

    return work.get_future().then(arrived)


def report(state):
    slowest = max(state.seconds.values(), default=0.0)
    if slowest > 10:
        print(f"slowest bucket took {slowest:.1f}s")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 12, 1))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = x + self.block(x)
        return self.head(x.mean((2, 3)))


def images(generator):
    return (
        torch.randn(12, 3, 6, 6, generator=generator),
        torch.randint(0, 5, (12,), generator=generator),
    )


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


case = Case(model=Net, batch=images, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
    ddp.register_comm_hook(Stopwatch(), timed_average)
    loss(ddp, shard).backward()
