"""Retention times of peptides; a flat Adam that exchanges one buffer per step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_equivalence import Case

RESIDUES, LENGTH, STEPS = 20, 8, 3
RATE, BETAS, EPSILON = 0.05, (0.8, 0.95), 1e-3


class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.residue = nn.Embedding(RESIDUES, 6)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, 6))
        self.head = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, peptide: Tensor) -> Tensor:
        return self.head((self.residue(peptide) * self.position.exp()).sum(1)).squeeze(-1)


def peptides(generator: torch.Generator) -> dict[str, Tensor]:
    rows = 16 * STEPS
    return {
        "peptide": torch.randint(0, RESIDUES, (rows, LENGTH), generator=generator),
        "minutes": torch.randn(rows, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["peptide"]) - batch["minutes"]).abs().square().mean()


class FlatAdam:
    """Adam on all parameters as one vector."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.weights = parameters_to_vector(self.parameters).detach().clone()
        self.first = torch.zeros_like(self.weights)
        self.second = torch.zeros_like(self.weights)
        self.steps = 0

    def exchange(self, gradient: Tensor) -> Tensor:
        """Gradients and their squares travel together: one message instead of two."""
        both = torch.stack([gradient, gradient.square()])
        dist.all_reduce(both)
        return both / dist.get_world_size()

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters])
        mean, square = self.exchange(gradient)
        self.first.lerp_(mean, 1 - BETAS[0])
        self.second.lerp_(square, 1 - BETAS[1])
        first = self.first / (1 - BETAS[0] ** self.steps)
        second = self.second / (1 - BETAS[1] ** self.steps)
        self.weights -= RATE * first / (second.sqrt() + EPSILON)
        vector_to_parameters(self.weights, self.parameters)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def step(model: nn.Module, rank):
    optimizer = FlatAdam(model)

    def train(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    return train


case = Case(model=Retention, batch=peptides, loss=loss, layout="1x2")
options = {
    "compare": "update",
    "steps": STEPS,
    "optimizer": lambda parameters: torch.optim.Adam(parameters, RATE, BETAS, EPSILON),
}
