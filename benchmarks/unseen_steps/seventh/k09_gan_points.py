"""A generator and a critic for points in the plane, averaged by hand."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

LR = 0.05


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2))
        self.critic = nn.Sequential(nn.Linear(2, 10), nn.Softplus(), nn.Linear(10, 1))


def make_batch(generator):
    angle = torch.rand(24, generator=generator) * 6.28
    return {
        "noise": torch.randn(24, 3, generator=generator),
        "real": torch.stack([angle.cos(), angle.sin()], dim=-1),
    }


def critic_loss(pair, batch):
    fake = pair.generator(batch["noise"]).detach()
    return F.softplus(-pair.critic(batch["real"])).mean() + F.softplus(pair.critic(fake)).mean()


def generator_loss(pair, batch):
    return F.softplus(-pair.critic(pair.generator(batch["noise"]))).mean()


def reference(model):
    of_critic = torch.optim.SGD(model.critic.parameters(), lr=LR)
    of_generator = torch.optim.SGD(model.generator.parameters(), lr=LR)

    def train(batch):
        of_critic.zero_grad()
        critic_loss(model, batch).backward()
        of_critic.step()
        of_generator.zero_grad()
        generator_loss(model, batch).backward()
        of_generator.step()

    return train


def average(module):
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Phase:
    def __init__(self, module, objective):
        self.module, self.objective = module, objective
        self.optimizer = torch.optim.SGD(module.parameters(), lr=LR)

    def before(self):
        self.optimizer.zero_grad()

    def after(self):
        average(self.module)
        self.optimizer.step()


class CriticPhase(Phase):
    def after(self):
        self.optimizer.step()
        average(self.module)  # for the gradient norms in the log


def step(model, rank):
    phases = [CriticPhase(model.critic, critic_loss), Phase(model.generator, generator_loss)]

    def train(shard):
        for phase in phases:
            phase.before()
            phase.objective(model, shard).backward()
            phase.after()

    return train


case = Case(model=Pair, batch=make_batch)
options = {"compare": "update", "reference": reference, "steps": 2}
