"""Character classifier with a z-loss against drifting logits.

The two losses are logged apart, with the gradient norm of the first.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

Z_WEIGHT = 0.1


class CharNet(nn.Module):
    def __init__(self, chars=26, dim=8, classes=5):
        super().__init__()
        self.chars = nn.EmbeddingBag(chars, dim, mode="mean")
        self.hidden = nn.Linear(dim, 16)
        self.classes = nn.Linear(16, classes)

    def forward(self, words):
        return self.classes(torch.tanh(self.hidden(self.chars(words))))


def words(generator):
    return {
        "words": torch.randint(26, (12, 7), generator=generator),
        "languages": torch.randint(5, (12,), generator=generator),
    }


def task_loss(logits, batch):
    return F.cross_entropy(logits, batch["languages"])


def z_loss(logits):
    return Z_WEIGHT * logits.logsumexp(dim=-1).square().mean()


def loss(model, batch):
    logits = model(batch["words"])
    return task_loss(logits, batch) + z_loss(logits)


case = Case(model=CharNet, batch=words, loss=loss, layout="1x3")


class Log(dict):
    def grad_norm(self, name, module):
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        self[name] = float(torch.stack([g.norm() for g in grads]).norm()) if grads else 0.0


def train_on(ddp, batch, log):
    logits = ddp(batch["words"])
    task, z = task_loss(logits, batch), z_loss(logits)
    log["task"], log["z"] = task.item(), z.item()
    task.backward(retain_graph=True)
    log.grad_norm("task_norm", ddp)
    z.backward()
    log.grad_norm("norm", ddp)


def step(model, shard, rank):
    log = Log()
    train_on(DistributedDataParallel(model), shard, log)
