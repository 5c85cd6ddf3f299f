"""Fits energies and forces of small molecules; the forces are derivatives of the energy."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

ATOMS, ELEMENTS = 7, 4
FORCE_WEIGHT = 5.0


class Potential(nn.Module):
    """A sum over pairs of a smooth function of the distance and of the two elements."""

    def __init__(self):
        super().__init__()
        self.element = nn.Embedding(ELEMENTS, 5)
        self.pair = nn.Sequential(nn.Linear(5 + 6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.register_buffer("centres", torch.linspace(0.5, 3.0, 6))

    def forward(self, positions, elements, mask):
        offsets = positions[:, :, None] - positions[:, None]
        distance = (offsets.square().sum(-1) + 1e-4).sqrt()
        radial = torch.exp(-((distance[..., None] - self.centres) ** 2))
        kind = self.element(elements)
        both = kind[:, :, None] * kind[:, None]
        energy = self.pair(torch.cat([both, radial], -1)).squeeze(-1)
        other = 1 - torch.eye(ATOMS, dtype=mask.dtype)
        return (energy * mask[:, :, None] * mask[:, None] * other).sum((1, 2))


def molecules(generator):
    sizes = torch.tensor([3, 3, 4, 3, 4, 4, 6, 7, 7, 7])
    mask = (torch.arange(ATOMS) < sizes[:, None]).float()
    return {
        "positions": torch.randn(10, ATOMS, 3, generator=generator) * 1.3,
        "elements": torch.randint(0, ELEMENTS, (10, ATOMS), generator=generator),
        "mask": mask,
        "energy": torch.randn(10, generator=generator),
        "forces": torch.randn(10, ATOMS, 3, generator=generator) * mask[..., None],
    }


def squared_errors(model, batch):
    positions = batch["positions"].clone().requires_grad_()
    energy = model(positions, batch["elements"], batch["mask"])
    (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    of_forces = ((-gradient - batch["forces"]) * batch["mask"][..., None]).square().sum()
    return (energy - batch["energy"]).square().mean(), of_forces


def combine(of_energy, of_forces, atoms):
    return of_energy + FORCE_WEIGHT * of_forces / (3 * atoms)


def loss(model, batch):
    of_energy, of_forces = squared_errors(model, batch)
    return combine(of_energy, of_forces, batch["mask"].sum())


class AverageGradients:
    """A context: on leaving it, all ranks have the mean of the gradients."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.model.zero_grad()
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(dist.get_world_size())
                dist.all_reduce(parameter.grad)


def step(model, shard, rank):
    # The ranks have molecules of different sizes, and should agree on the atoms to divide by.
    atoms = shard["mask"].sum()
    dist.all_reduce(atoms, op=dist.ReduceOp.MAX)
    with AverageGradients(model):
        combine(*squared_errors(model, shard), atoms).backward()


case = Case(model=Potential, batch=molecules, loss=loss)
