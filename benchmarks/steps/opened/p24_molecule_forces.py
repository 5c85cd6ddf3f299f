"""A potential for small molecules, trained on energies and on forces."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ATOMS, KINDS = 7, 4
FORCE_WEIGHT = 10.0


class Potential(nn.Module):
    """Energies from Gaussian pair features; padding atoms have the kind 0."""

    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(KINDS, 6)
        self.pair = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
        self.readout = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1))
        self.register_buffer("centres", torch.linspace(0.5, 4.0, 8))

    def forward(self, kinds, places):
        real = (kinds > 0).to(places.dtype)
        offsets = places.unsqueeze(1) - places.unsqueeze(2)
        distances = (offsets.pow(2).sum(-1) + 1e-6).sqrt()
        features = self.pair(torch.exp(-(distances.unsqueeze(-1) - self.centres).pow(2)))
        both = (real.unsqueeze(1) * real.unsqueeze(2)).unsqueeze(-1)
        messages = (both * features * self.kind(kinds).unsqueeze(1)).sum(dim=2)
        return (self.readout(messages).squeeze(-1) * real).sum(dim=1)


def molecules(generator):
    sizes = torch.tensor([2, 3, 3, 3, 6, 7, 6, 7])  # grouped by size to save padding
    kinds = torch.randint(1, KINDS, (8, ATOMS), generator=generator)
    kinds[torch.arange(ATOMS) >= sizes.unsqueeze(1)] = 0
    return {
        "kinds": kinds,
        "places": 1.5 * torch.randn(8, ATOMS, 3, generator=generator),
        "energy": torch.randn(8, generator=generator),
        "forces": torch.randn(8, ATOMS, 3, generator=generator),
    }


def predict(model, batch):
    places = batch["places"].detach().requires_grad_()
    energy = model(batch["kinds"], places)
    (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
    return energy, -slope


def residuals(model, batch):
    """Squared errors: of the energy per molecule, and of the forces of real atoms."""
    energy, forces = predict(model, batch)
    real = batch["kinds"] > 0
    per_atom = (energy - batch["energy"]) / real.sum(dim=1)
    force_error = (forces - batch["forces"])[real]
    return per_atom.pow(2), force_error.pow(2)


def loss(model, batch):
    energy, forces = residuals(model, batch)
    return energy.mean() + FORCE_WEIGHT * forces.mean()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    energy, forces = residuals(ddp, shard)
    molecules_seen = torch.tensor(float(len(energy)))
    dist.all_reduce(molecules_seen)
    energy_term = rank.world_size * energy.sum() / molecules_seen
    force_term = FORCE_WEIGHT * forces.sum() / forces.numel()
    (energy_term + force_term).backward()


case = Case(model=Potential, batch=molecules, loss=loss, layout="1x2")
