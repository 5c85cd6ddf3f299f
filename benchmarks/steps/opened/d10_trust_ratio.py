"""Our own optimizer for climate emulators: every tensor moves by a share of its own norm (LARS).

``TrustSGD`` is for one process. ``ParallelTrustSGD`` averages over the processes on its own, so
that models needn't be wrapped.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

LEVELS = 10


class Emulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(LEVELS, 16)
        self.column = nn.Conv1d(1, 3, 3, padding=1)
        self.outward = nn.Linear(3 * 16, LEVELS)

    def forward(self, profile):
        hidden = torch.tanh(self.inward(profile))
        hidden = torch.tanh(self.column(hidden.unsqueeze(1)))
        return profile + self.outward(hidden.flatten(1))


class TrustSGD(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.1, trust=0.02):
        super().__init__(parameters, {"lr": lr, "trust": trust})

    def prepare(self, parameter, trust):
        """Rescales the gradient to the trust ratio."""
        norm = parameter.grad.norm()
        if norm > 0:
            parameter.grad.mul_(trust * (1 + parameter.norm()) / norm)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.prepare(parameter, group["trust"])
                parameter.add_(parameter.grad, alpha=-group["lr"])


class ParallelTrustSGD(TrustSGD):
    def prepare(self, parameter, trust):
        super().prepare(parameter, trust)
        self.average(parameter.grad)

    @staticmethod
    def average(gradient):
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())


def columns(generator):
    """Profiles of temperature now, and an hour later."""
    now = torch.randn(16, LEVELS, generator=generator)
    return {"now": now, "later": now.roll(1, 1) + torch.randn(16, LEVELS, generator=generator)}


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["now"]), batch["later"])


def make_optimizer(parameters):
    return TrustSGD(parameters)


case = Case(model=Emulator, batch=columns, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer}


def step(model, shard, rank):
    optimizer = ParallelTrustSGD(model.parameters())
    optimizer.zero_grad()
    loss(model, shard).backward()
    optimizer.step()
