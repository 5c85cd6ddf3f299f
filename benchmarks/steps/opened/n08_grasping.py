"""Behaviour cloning for a gripper: small micro-batches, gradients exchanged while backward runs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

DEMOS, POINTS, JOINTS = 16, 10, 4


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 16), nn.ELU())
        self.joints = nn.Linear(16, JOINTS)
        self.close = nn.Linear(16, 1)

    def forward(self, cloud):
        pooled = self.point(cloud).amax(dim=1)
        return self.joints(pooled), self.close(pooled)[:, 0]


def make_batch(generator):
    return {
        "cloud": torch.randn(DEMOS, POINTS, 3, generator=generator),
        "joints": torch.randn(DEMOS, JOINTS, generator=generator),
        "close": torch.randint(2, (DEMOS,), generator=generator).double(),
    }


def loss(model, batch):
    joints, close = model(batch["cloud"])
    grip = F.binary_cross_entropy_with_logits(close, batch["close"])
    return F.mse_loss(joints, batch["joints"]) + 0.2 * grip


class Exchange:
    """Overlaps communication with backward: one all_reduce per parameter, waited for at the end."""

    def __init__(self, model, scale):
        self.model, self.scale = model, scale
        self.pending = []

    def __enter__(self):
        self.handles = [
            p.register_post_accumulate_grad_hook(self.start) for p in self.model.parameters()
        ]
        return self

    def start(self, parameter):
        self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()
        for parameter in self.model.parameters():
            parameter.grad.mul_(self.scale)


def micro_batches(shard, size):
    count = len(shard["cloud"])
    for start in range(0, count, size):
        yield {name: rows[start : start + size] for name, rows in shard.items()}


def step(model, shard, rank, size=4):
    micros = list(micro_batches(shard, size))
    with Exchange(model, scale=1 / (rank.world_size * len(micros))) as exchange:
        for micro in micros:
            loss(model, micro).backward()
            exchange.wait()


case = Case(model=Policy, batch=make_batch, loss=loss)
