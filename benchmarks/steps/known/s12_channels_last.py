"""A convolutional network in channels-last format, with gradients averaged one by one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, kernel_size=3, padding=1)
        self.block = nn.Conv2d(4, 6, kernel_size=3, stride=2, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(24, 3)

    def forward(self, images):
        x = F.relu(self.stem(images))
        x = F.relu(self.block(x))
        return self.fc(self.pool(x).flatten(1))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_batch(generator):
    images = torch.randn(8, 3, 6, 6, generator=generator)
    labels = torch.randint(0, 3, (8,), generator=generator)
    return images, labels


case = Case(model=ConvNet, batch=make_batch, loss=loss, layout="1x2")


class GradientAverager:
    """The backend takes contiguous tensors only."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.world_size = dist.get_world_size()

    def __call__(self):
        for p in self.params:
            if p.grad is None:
                continue
            gradient = p.grad.contiguous()
            dist.all_reduce(gradient)
            gradient.div_(self.world_size)


def to_channels_last(batch):
    images, labels = batch
    return images.contiguous(memory_format=torch.channels_last), labels


def train_one_batch(model, batch):
    model = model.to(memory_format=torch.channels_last)
    average = GradientAverager(model)
    model.zero_grad(set_to_none=True)
    value = loss(model, to_channels_last(batch))
    value.backward()
    average()
    return value.item()


def step(model, shard, rank):
    train_one_batch(model, shard)
