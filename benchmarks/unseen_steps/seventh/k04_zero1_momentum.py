"""ZeRO stage 1 by hand: every parameter has one owner, who alone keeps its momentum."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

LR, MOMENTUM = 0.05, 0.9


def build():
    return nn.Sequential(
        nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def make_batch(generator):
    return {
        "x": torch.randn(32, 10, generator=generator),
        "y": torch.randn(32, 3, generator=generator),
    }


def loss(model, batch):
    return F.huber_loss(model(batch["x"]), batch["y"])


class ShardedMomentum:
    def __init__(self, params, rank, world_size):
        self.params = list(params)
        self.rank, self.world_size = rank, world_size
        by_size = sorted(range(len(self.params)), key=lambda i: -self.params[i].numel())
        # the largest first, dealt in turn, so that the ranks hold about equally much
        self.owner = {index: place % world_size for place, index in enumerate(by_size)}
        self.buffers = {
            i: torch.zeros_like(p) for i, p in enumerate(self.params) if self.owner[i] == rank
        }

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def reduce(self):
        for i, p in enumerate(self.params):
            p.grad.div_(self.world_size)
            dist.reduce(p.grad, dst=self.owner[i])

    @torch.no_grad()
    def step(self):
        self.reduce()
        for i, buffer in self.buffers.items():
            buffer.mul_(MOMENTUM).add_(self.params[i].grad)
            self.params[i].sub_(LR * buffer)
        for place, p in enumerate(self.params):
            dist.broadcast(p.data, src=place % self.world_size)


class Train:
    def __init__(self, model, rank):
        self.model = model
        self.optimizer = ShardedMomentum(model.parameters(), int(rank), rank.world_size)

    def __call__(self, shard):
        self.optimizer.zero_grad()
        loss(self.model, shard).backward()
        self.optimizer.step()


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)


case = Case(model=build, batch=make_batch, loss=loss, layout="1x2")
step = Train
options = {"compare": "update", "optimizer": make_optimizer, "steps": 2}
