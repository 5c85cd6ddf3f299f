"""Gradients live in one contiguous buffer, so that one all-reduce covers the whole model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4 * 5 * 5, 3)

    def forward(self, images):
        features = F.relu(self.norm(self.conv(images)))
        return self.fc(features.flatten(1))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_batch(generator):
    images = torch.randn(8, 2, 5, 5, generator=generator)
    labels = torch.randint(0, 3, (8,), generator=generator)
    return images, labels


case = Case(model=ConvNet, batch=make_batch, loss=loss, layout="1x4")


class ContiguousGradients:
    """Makes every ``p.grad`` a view of one buffer."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        total = sum(p.numel() for p in self.params)
        self.buffer = self.params[0].new_zeros(total)
        start = 0
        for p in self.params:
            p.grad = self.buffer[start : start + p.numel()].view_as(p)
            start += p.numel()

    def all_reduce(self):
        dist.all_reduce(self.buffer)
        self.buffer /= dist.get_world_size()


class Engine:
    def __init__(self, model, learning_rate=0.1):
        self.model = model
        self.gradients = ContiguousGradients(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)

    def forward_backward(self, batch):
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        return value.item()

    def train_batch(self, batch):
        value = self.forward_backward(batch)
        self.gradients.all_reduce()
        return value


def step(model, shard, rank):
    engine = Engine(model)
    engine.train_batch(shard)
