"""A communication hook that keeps the norm of every bucket's gradient within a limit."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


class Calibrator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.body(x))).squeeze(-1)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_batch(generator):
    x = torch.randn(12, 4, generator=generator)
    y = 0.1 * torch.randn(12, generator=generator)
    y[:6] += 6.0  # two instruments, with offsets of their own
    y[6:] -= 6.0
    return {"x": x, "y": y}


case = Case(model=Calibrator, batch=make_batch, loss=loss, layout="1x2")


@dataclass
class ClipState:
    """What the hook needs to know; ``max_norm`` is a limit for the gradient of the global batch."""

    group: dist.ProcessGroup
    max_norm: float

    @property
    def size(self):
        return self.group.size()


def clip_(buffer, max_norm):
    factor = max_norm / (buffer.norm() + 1e-6)
    return buffer.mul_(factor.clamp(max=1.0))


def clipped_allreduce_hook(state, bucket):
    buffer = clip_(bucket.buffer(), state.max_norm)
    buffer.div_(state.size)
    future = dist.all_reduce(buffer, group=state.group, async_op=True).get_future()

    def finish(done):
        return done.value()[0]

    return future.then(finish)


def wrap(model, max_norm):
    ddp = DDP(model, bucket_cap_mb=25)
    ddp.register_comm_hook(ClipState(dist.group.WORLD, max_norm), clipped_allreduce_hook)
    return ddp


def step(model, shard, rank):
    model.zero_grad()
    ddp = wrap(model, max_norm=10.0)
    loss(ddp, shard).backward()
