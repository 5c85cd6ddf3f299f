"""Two tasks with a shared encoder, one backward each; gradients go through one flat buffer."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

EXAMPLES, FEATURES, CLASSES = 16, 6, 5


@dataclass(frozen=True)
class Weights:
    tasks: dict = field(default_factory=lambda: {"segments": 1.0, "depth": 0.5})


WEIGHTS = Weights()


class SharedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 10), nn.GELU(), nn.LayerNorm(10))
        self.heads = nn.ModuleDict(
            {"segments": nn.Linear(10, CLASSES), "depth": nn.Linear(10, 1)}
        )

    def forward(self, x, task):
        return self.heads[task](self.encoder(x))


def task_loss(model, batch, task):
    output = model(batch["x"], task)
    if task == "segments":
        return F.cross_entropy(output, batch["segments"])
    return F.l1_loss(output.squeeze(-1), batch["depth"])


def loss(model, batch):
    return sum(weight * task_loss(model, batch, task) for task, weight in WEIGHTS.tasks.items())


def make_batch(generator):
    return {
        "x": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "segments": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
        "depth": torch.randn(EXAMPLES, generator=generator),
    }


case = Case(model=SharedEncoder, batch=make_batch, loss=loss, layout="1x2")


class FlatGradients:
    """One buffer for communication, and one of the same shape that collects the tasks."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        total = sum(p.numel() for p in self.parameters)
        self.buffer = self.parameters[0].new_zeros(total)
        self.collected = self.parameters[0].new_zeros(total)

    def views(self, flat):
        sizes = [p.numel() for p in self.parameters]
        for parameter, piece in zip(self.parameters, flat.split(sizes)):
            yield parameter, piece.view_as(parameter)

    def pack(self):
        for parameter, view in self.views(self.buffer):
            if parameter.grad is not None:
                view.copy_(parameter.grad)

    def reduce(self):
        self.pack()
        dist.all_reduce(self.buffer)
        self.collected.add_(self.buffer, alpha=1.0 / dist.get_world_size())

    def publish(self):
        for parameter, view in self.views(self.collected):
            parameter.grad = view.clone()


class MultiTaskTrainer:
    def __init__(self, model, weights):
        self.model, self.weights = model, weights
        self.gradients = FlatGradients(model.parameters())

    def train_step(self, batch):
        for task, weight in self.weights.tasks.items():
            self.model.zero_grad(set_to_none=True)
            (weight * task_loss(self.model, batch, task)).backward()
            self.gradients.reduce()
        self.gradients.publish()


def step(model, shard, rank):
    MultiTaskTrainer(model, WEIGHTS).train_step(shard)
