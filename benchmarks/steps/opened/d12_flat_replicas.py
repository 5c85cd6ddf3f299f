"""A small data-parallel wrapper of our own, from before we could upgrade torch on the test bench.

It starts the exchange of a group of gradients as soon as the group is complete, during backward.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddp_equivalence import Case


class Surrogate(nn.Module):
    """Lift and drag of a wing section from its shape and its angle."""

    def __init__(self, shape=8, hidden=14):
        super().__init__()
        self.lift_in = nn.Linear(shape, hidden)
        self.angle = nn.Linear(2, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, shape, angle):
        turned = torch.cat([angle.sin(), angle.cos()], dim=1)
        hidden = self.norm(self.lift_in(shape) + self.angle(turned))
        return self.out(nn.functional.mish(self.middle(hidden)))


def sections(generator):
    return (
        torch.randn(12, 8, generator=generator),
        torch.rand(12, 1, generator=generator) * 0.3,
        torch.randn(12, 2, generator=generator),
    )


def loss(model, batch):
    shape, angle, forces = batch
    return nn.functional.huber_loss(model(shape, angle), forces, delta=0.5)


case = Case(model=Surrogate, batch=sections, loss=loss, layout="1x3")


class Group:
    def __init__(self, parameters):
        self.parameters, self.missing = parameters, len(parameters)
        self.flat = self.work = None

    def ready(self, _):
        self.missing -= 1
        if self.missing == 0:
            self.flat = _flatten_dense_tensors([p.grad for p in self.parameters])
            self.flat /= dist.get_world_size()
            self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self):
        self.work.wait()
        grads = [p.grad for p in self.parameters]
        for grad, mean in zip(grads, _unflatten_dense_tensors(self.flat, grads)):
            grad.copy_(mean)


class Replica(nn.Module):
    def __init__(self, module, group_size=2):
        super().__init__()
        self.module = module
        backwards = list(module.parameters())[::-1]
        starts = range(0, len(backwards) - group_size + 1, group_size)
        self.groups = [Group(backwards[start : start + group_size]) for start in starts]
        for group in self.groups:
            for parameter in group.parameters:
                parameter.register_post_accumulate_grad_hook(group.ready)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        for group in self.groups:
            group.finish()


def step(model, shard, rank):
    replica = Replica(model)
    loss(replica, shard).backward()
    replica.finish()
