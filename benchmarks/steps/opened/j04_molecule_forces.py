"""Energies and forces of padded molecules: the forces are gradients, so this is a double backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddp_equivalence import Case

ELEMENTS, LARGEST, RADII = 4, 8, 6


class Errors(NamedTuple):
    energy: Tensor  # (molecules,)
    force: Tensor  # (molecules, atoms, 3), zero where there is no atom


class Potential(nn.Module):
    """A sum over pairs of atoms of a learned function of their distance and their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.element = nn.Embedding(ELEMENTS, 5)
        self.pair = nn.Sequential(nn.Linear(RADII + 5, 16), nn.SiLU(), nn.Linear(16, 1))
        self.alone = nn.Linear(5, 1)
        self.register_buffer("centres", torch.linspace(0.5, 3.0, RADII))

    def forward(self, kinds: Tensor, positions: Tensor, present: Tensor) -> Tensor:
        kinds = self.element(kinds)
        apart = positions.unsqueeze(2) - positions.unsqueeze(1)
        distance = (apart.square().sum(-1) + 1e-2).sqrt()
        radial = torch.exp(-(distance.unsqueeze(-1) - self.centres).square())
        both = kinds.unsqueeze(2) * kinds.unsqueeze(1)
        pairs = self.pair(torch.cat([radial, both], dim=-1)).squeeze(-1)
        pairs = pairs * present.unsqueeze(2) * present.unsqueeze(1)
        pairs = pairs * (1 - torch.eye(LARGEST).to(pairs))
        alone = self.alone(kinds).squeeze(-1) * present
        return pairs.sum(dim=(1, 2)) / 2 + alone.sum(dim=1)


def errors(model: nn.Module, batch: dict) -> Errors:
    positions = batch["positions"].detach().requires_grad_()
    energy = model(batch["kinds"], positions, batch["present"])
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    wrong = (-slope - batch["forces"]) * batch["present"].unsqueeze(-1)
    return Errors(energy - batch["energy"], wrong)


def loss(model: nn.Module, batch: dict) -> Tensor:
    energy, force = errors(model, batch)
    return energy.square().mean() + 20 * force.square().sum() / batch["present"].sum()


def molecules(generator: torch.Generator) -> dict:
    count = 12
    # Small molecules come first in the file.
    sizes = torch.tensor([2, 2, 3, 3, 3, 4, 6, 6, 7, 7, 8, 8])
    return {
        "kinds": torch.randint(0, ELEMENTS, (count, LARGEST), generator=generator),
        "positions": 2 * torch.randn(count, LARGEST, 3, generator=generator),
        "present": (torch.arange(LARGEST) < sizes.unsqueeze(1)).float(),
        "energy": torch.randn(count, generator=generator),
        "forces": torch.randn(count, LARGEST, 3, generator=generator),
    }


case = Case(model=Potential, batch=molecules, loss=loss, layout="1x2")


def average_gradients(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, averaged in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
        gradient.copy_(averaged)


def step(model: nn.Module, shard: dict, rank) -> None:
    energy, force = errors(model, shard)
    atoms = shard["present"].sum()
    total = energy.square().mean() + 20 * force.square().sum() / atoms
    total.backward()
    average_gradients(model)
