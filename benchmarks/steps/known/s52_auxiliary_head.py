"""A classifier with an auxiliary head for training (as in GoogLeNet), and a running evaluation."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

AUXILIARY_WEIGHT = 0.4


class TwoStageNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = nn.Linear(6, 8)
        self.late = nn.Linear(8, 8)
        self.auxiliary = nn.Linear(8, 4)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        early = torch.tanh(self.early(x))
        logits = self.head(torch.tanh(self.late(early)))
        return (logits, self.auxiliary(early)) if self.training else (logits, None)


def loss(model, batch):
    logits, auxiliary = model(batch["x"])
    value = F.cross_entropy(logits, batch["y"])
    if auxiliary is not None:
        value = value + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, batch["y"])
    return value


def make_batch(generator):
    return {
        "x": torch.randn(12, 6, generator=generator),
        "y": torch.randint(0, 4, (12,), generator=generator),
    }


case = Case(model=TwoStageNet, batch=make_batch, loss=loss, layout="1x2")


@contextmanager
def evaluating(model):
    """Puts the model into evaluation mode, and back into its former mode at the end."""
    model.eval()
    was_training = model.training
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def accuracy(model, batch):
    with evaluating(model):
        logits, _ = model(batch["x"])
        return (logits.argmax(dim=1) == batch["y"]).double().mean()


def step(model, shard, rank):
    metrics = {"accuracy before": accuracy(model, shard)}
    dist.all_reduce(metrics["accuracy before"])
    model.zero_grad()
    loss(model, shard).backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= rank.world_size
