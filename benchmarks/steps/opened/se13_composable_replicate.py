"""Two-headed model under composable replicate(): a regression and a contrastive-like term."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate

from ddp_equivalence import Case


class Encoder(nn.Module):
    def __init__(self, features=10, width=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )

    def forward(self, x):
        return self.layers(x)


class PairModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(16, 1)
        self.project = nn.Linear(16, 6)

    def embed(self, x):
        hidden = self.encoder(x)
        return self.head(hidden).squeeze(-1), F.normalize(self.project(hidden), dim=-1)

    def forward(self, x):
        return self.embed(x)


def batch(generator):
    anchor = torch.randn(16, 10, generator=generator)
    noise = torch.randn(16, 10, generator=generator)
    return {"anchor": anchor, "other": anchor + 0.3 * noise, "value": anchor.norm(dim=1)}


def objective(anchor_out, other_out, value):
    predicted, a = anchor_out
    _, b = other_out
    # no negatives: pairs do not interact with each other
    return F.mse_loss(predicted, value) + (1 - (a * b).sum(-1)).mean()


def stacked(data):
    return torch.cat([data["anchor"], data["other"]])


def loss(model, batch):
    predicted, projected = model(stacked(batch))
    p, z = predicted.chunk(2), projected.chunk(2)
    return objective((p[0], z[0]), (p[1], z[1]), batch["value"])


class Task:
    def __init__(self, model, **kwargs):
        self.model = replicate(model, **kwargs)

    def training_step(self, data):
        predicted, projected = self.model.embed(stacked(data))
        p, z = predicted.chunk(2), projected.chunk(2)
        return objective((p[0], z[0]), (p[1], z[1]), data["value"])


def step(model, shard, rank):
    task = Task(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    task.training_step(shard).backward()


case = Case(model=PairModel, batch=batch, loss=loss, layout="1x2")
