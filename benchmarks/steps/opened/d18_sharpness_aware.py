"""Defects on steel strips, trained with sharpness-aware minimisation (SAM).

``loss`` is SAM's objective on one device: the loss at the weights moved by RADIUS uphill.
``SharpnessAware`` does the same in two passes, each with an exchange.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from ddp_equivalence import Case

RADIUS = 0.2
DEFECTS = 5


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(4 * 9, DEFECTS)
    )


def strips(generator):
    return {
        "image": torch.randn(12, 1, 8, 8, generator=generator),
        "defects": (torch.rand(12, DEFECTS, generator=generator) < 0.3).double(),
    }


def plain_loss(logits, batch):
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["defects"])


def norm_of(gradients):
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def loss(model, batch):
    weights = dict(model.named_parameters())
    here = plain_loss(model(batch["image"]), batch)
    uphill = torch.autograd.grad(here, list(weights.values()))
    length = RADIUS / norm_of(uphill)
    moved = {name: w + length * up for (name, w), up in zip(weights.items(), uphill)}
    return plain_loss(functional_call(model, moved, (batch["image"],)), batch)


case = Case(model=build_model, batch=strips, loss=loss, layout="1x2")


class SharpnessAware:
    def __init__(self, model, radius=RADIUS):
        self.weights, self.radius = list(model.parameters()), radius
        self.moves = []

    def exchange(self):
        for weight in self.weights:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()

    @torch.no_grad()
    def climb(self):
        length = self.radius / norm_of([weight.grad for weight in self.weights])
        self.exchange()
        self.moves = [length * weight.grad for weight in self.weights]
        for weight, move in zip(self.weights, self.moves):
            weight += move
            weight.grad = None

    @torch.no_grad()
    def descend(self):
        self.exchange()
        for weight, move in zip(self.weights, self.moves):
            weight -= move


def step(model, shard, rank):
    sam = SharpnessAware(model)
    plain_loss(model(shard["image"]), shard).backward()
    sam.climb()
    plain_loss(model(shard["image"]), shard).backward()
    sam.descend()
