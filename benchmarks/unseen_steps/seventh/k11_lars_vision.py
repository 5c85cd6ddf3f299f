"""LARS for a small convolutional classifier; gradients are averaged inside the optimizer."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


def build():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(24, 5)
    )


def make_batch(generator):
    return {
        "images": torch.randn(16, 2, 6, 6, generator=generator),
        "labels": torch.randint(0, 5, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr=0.5, trust=0.02, weight_decay=1e-3):
        super().__init__(params, {"lr": lr, "trust": trust, "weight_decay": weight_decay})

    def gradient(self, p):
        return p.grad

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = self.trust_ratio(p, group)
                direction = self.gradient(p) + group["weight_decay"] * p
                p.sub_(group["lr"] * ratio * direction)

    def trust_ratio(self, p, group):
        if p.ndim == 1:
            return group["trust"]
        norm = p.grad.norm() + group["weight_decay"] * p.norm()
        return group["trust"] * p.norm() / norm


class DistributedLars(Lars):
    """Averages each gradient when it is needed, so that no second copy is kept."""

    def gradient(self, p):
        mean = p.grad.clone()
        dist.all_reduce(mean)
        return mean.div_(dist.get_world_size())


class Loop:
    def __init__(self, model, rank):
        self.model = model
        self.optimizer = DistributedLars(model.parameters())
        for p in model.parameters():
            dist.broadcast(p.data, src=0)

    def __call__(self, shard):
        self.optimizer.zero_grad()
        loss(self.model, shard).backward()
        self.optimizer.step()


step = Loop
case = Case(model=build, batch=make_batch, loss=loss)
options = {"compare": "update", "optimizer": lambda parameters: Lars(parameters)}
