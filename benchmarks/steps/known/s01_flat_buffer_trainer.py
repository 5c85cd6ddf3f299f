"""A trainer that packs all gradients into one flat buffer and reduces that once."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.projector = nn.Linear(8, 4)  # for pretraining only
        self.head = nn.Linear(8, 3)

    def forward(self, rows):
        return self.head(torch.tanh(self.trunk(rows)))


def loss(model, batch):
    rows, targets = batch
    return F.mse_loss(model(rows), targets)


def make_batch(generator):
    return (
        torch.randn(12, 6, generator=generator),
        torch.randn(12, 3, generator=generator),
    )


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x2")


class FlatBuffer:
    def __init__(self, params):
        self.params = list(params)
        total = sum(p.numel() for p in self.params)
        self.data = torch.zeros(total, dtype=self.params[0].dtype, device=self.params[0].device)

    def pack(self):
        self.data.zero_()
        start = 0
        for p in self.params:
            end = start + p.numel()
            if p.grad is not None:
                self.data[start:end].copy_(p.grad.reshape(-1))
            start = end

    def unpack(self):
        offset = 0
        for p in self.params:
            if p.grad is None:
                continue
            n = p.numel()
            p.grad.copy_(self.data[offset : offset + n].view_as(p))
            offset += n


class Trainer:
    def __init__(self, model, world_size):
        self.model = model
        self.world_size = world_size
        self.flat = FlatBuffer(p for p in model.parameters() if p.requires_grad)

    def sync_gradients(self):
        self.flat.pack()
        dist.all_reduce(self.flat.data)
        self.flat.data.div_(self.world_size)
        self.flat.unpack()

    def train_step(self, batch):
        self.model.zero_grad(set_to_none=True)
        value = loss(self.model, batch)
        value.backward()
        self.sync_gradients()
        return value.detach()


def step(model, shard, rank):
    Trainer(model, rank.world_size).train_step(shard)
