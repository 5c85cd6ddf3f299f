"""An autoencoder with a penalty on its code, made data parallel by the composable replicate()."""

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn import functional as F

from ddp_equivalence import Case

BETA = 0.3


class AutoEncoder(nn.Module):
    def __init__(self, size=11, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 13), nn.Tanh(), nn.Linear(13, code))
        self.decoder = nn.Sequential(nn.Linear(code, 13), nn.Tanh(), nn.Linear(13, size))

    def forward(self, rows):
        code = self.encoder(rows)
        return self.decoder(code), code

    def training_loss(self, rows):
        restored, code = self.forward(rows)
        return F.mse_loss(restored, rows) + BETA * code.pow(2).mean()


def rows(generator):
    basis = torch.randn(5, 11, generator=generator)
    return torch.randn(20, 5, generator=generator) @ basis


def objective(outputs, rows):
    restored, code = outputs
    return F.mse_loss(restored, rows) + BETA * code.pow(2).mean()


def loss(model, batch):
    return objective(model(batch), batch)


class Trainer:
    def __init__(self, model, bucket_cap_mb=25):
        self.model = replicate(model, bucket_cap_mb=bucket_cap_mb)

    def training_step(self, rows):
        value = self.model.training_loss(rows)
        value.backward()
        return {"loss": value.item()}


def step(model, shard, rank):
    Trainer(model).training_step(shard)


case = Case(model=AutoEncoder, batch=rows, loss=loss, layout="1x2")
