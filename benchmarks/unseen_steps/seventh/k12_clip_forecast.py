"""Forecasts the next values of a series with an LSTM, Adam and clipping of the global norm."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

HORIZON, LARGEST_NORM = 3, 0.2


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 9, batch_first=True)
        self.head = nn.Linear(9, HORIZON)

    def forward(self, history):
        hidden, _ = self.lstm(history)
        return self.head(hidden[:, -1])


def make_batch(generator):
    walks = torch.randn(24, 12, 2, generator=generator).cumsum(1)
    walks[:9] *= 0.2
    return {"history": walks[:, :-HORIZON], "future": walks[:, -HORIZON:, 0]}


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["history"]), batch["future"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.8, nesterov=True)


class Hooks(dict):
    """Functions by the point of the step at which they run, in the order of registration."""

    def on(self, point):
        def register(function):
            self.setdefault(point, []).append(function)
            return function

        return register

    def fire(self, point, trainer):
        for function in self.get(point, []):
            function(trainer)


hooks = Hooks()


@hooks.on("after_backward")
def clip(trainer):
    nn.utils.clip_grad_norm_(trainer.model.parameters(), LARGEST_NORM)


@hooks.on("before_step")
def exchange(trainer):
    flat = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for p in trainer.model.parameters():
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


class Trainer:
    def __init__(self, model, rank):
        self.model, self.rank = model, rank
        self.optimizer = make_optimizer(model.parameters())

    def __call__(self, shard):
        self.optimizer.zero_grad(set_to_none=True)
        loss(self.model, shard).backward()
        hooks.fire("after_backward", self)
        hooks.fire("before_step", self)
        self.optimizer.step()


step = Trainer
case = Case(model=Forecaster, batch=make_batch, loss=loss)
options = {
    "compare": "update", "optimizer": make_optimizer, "clip": LARGEST_NORM, "steps": 2,
}
