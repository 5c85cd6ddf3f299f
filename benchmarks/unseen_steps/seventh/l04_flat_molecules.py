"""Energies of molecules from distances. One flat buffer holds all gradients of a step."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

ATOMS = 5


class EnergyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.species = nn.Embedding(4, 6)
        self.radial = nn.Linear(8, 6, bias=False)
        self.hidden = nn.Linear(6, 6)
        self.energy = nn.Linear(6, 1)
        self.register_buffer("centres", torch.linspace(0.5, 4.0, 8))

    def forward(self, species, positions):
        distances = (positions[:, :, None] - positions[:, None] + 1e-3).norm(dim=-1)
        basis = torch.exp(-((distances[..., None] - self.centres) ** 2))
        messages = (self.radial(basis) * self.species(species)[:, None]).sum(2)
        return self.energy(torch.tanh(self.hidden(messages))).sum((1, 2))


def conformers(generator):
    return {
        "species": torch.randint(0, 4, (12, ATOMS), generator=generator),
        "positions": torch.randn(12, ATOMS, 3, generator=generator) * 1.5,
        "energy": torch.randn(12, generator=generator) * torch.arange(1.0, 13.0),
    }


def loss(model, batch):
    predicted = model(batch["species"], batch["positions"])
    return ((predicted - batch["energy"]) / ATOMS).square().mean()


class FlatGradients:
    def __init__(self, model):
        self.named = dict(model.named_parameters())

    def pack(self):
        # sorted: the order must not depend on the rank
        return torch.cat([self.named[name].grad.flatten() for name in sorted(self.named)])

    def unpack(self, flat):
        sizes = [parameter.numel() for parameter in self.named.values()]
        for parameter, part in zip(self.named.values(), flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def step(model, shard, rank):
    gradients = FlatGradients(model)
    loss(model, shard).backward()
    flat = gradients.pack()
    dist.all_reduce(flat)
    gradients.unpack(flat / rank.world_size)


case = Case(model=EnergyModel, batch=conformers, loss=loss, layout="1x2")
