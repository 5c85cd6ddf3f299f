"""An interatomic potential: energies of molecules, and forces on their atoms."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from ddp_equivalence import Case

MOLECULES, ATOMS = 8, 6
FORCE_WEIGHT = 4.0


class Potential(nn.Module):
    """Energy of a molecule as a sum over its atoms. Padding atoms have present == 0."""

    def __init__(self):
        super().__init__()
        self.atom = nn.Sequential(nn.Linear(4, 20), nn.Softplus(), nn.Linear(20, 1))

    def forward(self, positions, present):
        distances = (positions[:, :, None] - positions[:, None]).square().sum(-1)
        both = present[:, :, None] * present[:, None]
        radial = [(both * torch.exp(-distances / width)).sum(-1) for width in (0.5, 1.0, 2.0, 4.0)]
        return (self.atom(torch.stack(radial, dim=-1)).squeeze(-1) * present).sum(-1)


def make_batch(generator):
    sizes = torch.tensor([2, 2, 3, 3, 4, 5, 6, 6])
    return {
        "positions": torch.randn(MOLECULES, ATOMS, 3, generator=generator),
        "present": (torch.arange(ATOMS) < sizes[:, None]).double(),
        "energy": torch.randn(MOLECULES, generator=generator),
        "forces": torch.randn(MOLECULES, ATOMS, 3, generator=generator),
    }


def errors(model, batch):
    positions = batch["positions"].clone().requires_grad_()
    energy = model(positions, batch["present"])
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    squared = (-slope - batch["forces"]).square() * batch["present"][..., None]
    return (energy - batch["energy"]).square().mean(), squared.sum()


def loss(model, batch):
    energy, force = errors(model, batch)
    return energy + FORCE_WEIGHT * force / (3 * batch["present"].sum())


def average_gradients(model, world_size):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = flatten(grads)
    dist.all_reduce(flat)
    for grad, reduced in zip(grads, unflatten(flat / world_size, grads)):
        grad.copy_(reduced)


def step(model, shard, rank):
    energy, force = errors(model, shard)
    atoms = shard["present"].sum()
    dist.all_reduce(atoms)
    # Molecules are dealt evenly, atoms are not: these are counted over all ranks.
    total = energy + FORCE_WEIGHT * force / (3 * atoms)
    total.backward()
    average_gradients(model, rank.world_size)


case = Case(model=Potential, batch=make_batch, loss=loss, layout="1x2")
