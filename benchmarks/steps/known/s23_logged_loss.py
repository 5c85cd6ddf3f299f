"""A training loop in the style of many image classification scripts, with averaged logging."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.sum = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def average(self):
        return self.sum / max(self.count, 1)


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, kernel_size=3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )


def loss(model, batch):
    images, target = batch
    return F.cross_entropy(model(images), target)


def make_batch(generator):
    images = torch.rand(12, 1, 7, 7, generator=generator)
    return images, torch.randint(0, 5, (12,), generator=generator)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


def reduce_mean(tensor, nprocs):
    result = tensor.clone()
    dist.all_reduce(result)
    return result / nprocs


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def train(loader, model, nprocs):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    for images, target in loader:
        output = model(images)
        value = F.cross_entropy(output, target)
        value = reduce_mean(value, nprocs)
        model.zero_grad()
        value.backward()
        losses.update(value.item(), len(images))
        top1.update(reduce_mean(accuracy(output, target), nprocs).item(), len(images))
    return losses.average, top1.average


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    train([shard], ddp, rank.world_size)
