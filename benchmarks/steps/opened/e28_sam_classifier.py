"""Sharpness-aware minimisation (SAM): a first backward finds the uphill step, a second one the
gradient there. One big batch has one uphill step, so all ranks have to take the same."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

RHO = 0.1


class MixerBlock(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Linear(patches, patches)
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.block = MixerBlock(9, 12)
        self.classes = nn.Linear(12, 5)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.classes(self.block(x).mean(1))


def pictures(generator):
    images = torch.randn(16, 3, 12, 12, generator=generator)
    return images, torch.randint(5, (16,), generator=generator)


def uphill(gradients):
    norm = torch.stack([g.norm() for g in gradients]).norm()
    return [RHO / (norm + 1e-12) * g for g in gradients]


def plain(model, batch):
    images, classes = batch
    return cross_entropy(model(images), classes)


def loss(model, batch):
    """Its gradient is that of SAM: the loss uphill, where the way up is a constant."""
    names, weights = zip(*model.named_parameters())
    steps = uphill(torch.autograd.grad(plain(model, batch), weights))
    images, classes = batch
    moved = {name: w + s for name, w, s in zip(names, weights, steps)}
    return cross_entropy(functional_call(model, moved, (images,)), classes)


case = Case(model=Mixer, batch=pictures, loss=loss, layout="1x2")


class SAM:
    def __init__(self, model):
        self.weights = list(model.parameters())
        self.ddp = DistributedDataParallel(model)
        self.steps = []

    @torch.no_grad()
    def climb(self):
        self.steps = uphill([w.grad for w in self.weights])
        for weight, move in zip(self.weights, self.steps):
            weight += move
            weight.grad = None

    @torch.no_grad()
    def descend(self):
        for weight, move in zip(self.weights, self.steps):
            weight -= move

    def first_pass(self, batch):
        # these gradients never reach an optimizer: spare the network
        with self.ddp.no_sync():
            plain(self.ddp, batch).backward()
        self.climb()

    def second_pass(self, batch):
        plain(self.ddp, batch).backward()
        self.descend()


def step(model, shard, rank):
    sam = SAM(model)
    sam.first_pass(shard)
    sam.second_pass(shard)
