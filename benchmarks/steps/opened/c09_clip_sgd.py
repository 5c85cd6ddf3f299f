"""A regressor trained with SGD and clipping; gradients are averaged by one flat all_reduce."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddp_equivalence import Case

LR = 0.05
MAX_NORM = 0.4


def make_model():
    return nn.Sequential(
        nn.Linear(6, 18),
        nn.LayerNorm(18),
        nn.SiLU(),
        nn.Linear(18, 2),
    )


def make_batch(generator):
    rows = torch.randn(16, 6, generator=generator)
    rows[:4] *= 3.0
    return {"rows": rows, "targets": rows[:, :2] * rows[:, 2:4]}


def huber(model, batch):
    return nn.functional.huber_loss(model(batch["rows"]), batch["targets"], delta=2.0)


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


case = Case(model=make_model, batch=make_batch, loss=huber, layout="2x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM}


class Engine:
    """backward / clip / synchronize / update, each a method so that subclasses can hook in."""

    def __init__(self, model, world_size):
        self.model = model
        self.world_size = world_size
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters)

    def backward(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        value = huber(self.model, batch)
        value.backward()
        return value.detach()

    def clip(self):
        return nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    def synchronize(self):
        gradients = [p.grad for p in self.parameters]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat /= self.world_size
        for gradient, averaged in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
            gradient.copy_(averaged)

    def update(self):
        self.optimizer.step()

    def __call__(self, batch):
        self.backward(batch)
        self.clip()
        self.synchronize()
        self.update()


def step(model, shard, rank):
    Engine(model, rank.world_size)(shard)
