"""Fine-tuning: the trunk is frozen, and the rest is reduced when its last gradient is ready."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.adapter = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8))
        self.head = nn.Linear(8, 2)
        self.trunk.requires_grad_(requires_grad=False)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.head(hidden + self.adapter(hidden))


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_batch(generator):
    return {
        "x": torch.randn(10, 6, generator=generator),
        "y": torch.randn(10, 2, generator=generator),
    }


case = Case(model=FineTuned, batch=make_batch, loss=loss, layout="2x1")


class ReadyReducer:
    """Counts the gradients that are still to come, and reduces all of them after the last."""

    def __init__(self, module):
        self.module = module
        self.expected = len(list(module.parameters()))
        self.missing = self.expected
        self.world_size = dist.get_world_size()
        for p in self.trainable():
            p.register_post_accumulate_grad_hook(self.mark_ready)

    def trainable(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def mark_ready(self, _):
        self.missing -= 1
        if self.missing == 0:
            self.reduce()
            self.missing = self.expected

    def reduce(self):
        grads = [p.grad for p in self.trainable()]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= self.world_size
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(piece.view_as(grad))


def step(model, shard, rank):
    ReadyReducer(model)
    model.zero_grad()
    loss(model, shard).backward()
