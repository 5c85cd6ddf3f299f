"""A Hamiltonian network learns the motion of a pendulum; gradients go round a ring of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ddp_equivalence import Case


class Hamiltonian(nn.Module):
    """The energy H(q, p). Motion follows from it: q' = dH/dp, p' = -dH/dq."""

    def __init__(self, width: int = 11):
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(2, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus()
        )
        self.total = nn.Linear(width, 1, bias=False)

    def forward(self, state: Tensor) -> Tensor:
        state = state.detach().requires_grad_(True)
        energy = self.total(self.energy(state)).sum()
        (slope,) = torch.autograd.grad(energy, state, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], dim=1)


def loss(model: nn.Module, batch: dict) -> Tensor:
    return (model(batch["state"]) - batch["motion"]).square().sum(dim=1).mean()


def pendulum(generator: torch.Generator) -> dict:
    state = 2 * torch.randn(16, 2, generator=generator)
    motion = torch.stack([state[:, 1], -state[:, 0].sin()], dim=1)
    return {"state": state, "motion": motion}


case = Case(model=Hamiltonian, batch=pendulum, loss=loss, layout="1x4")


class Ring:
    """The all-reduce that needs the least bandwidth: each rank talks to its two neighbours only.

    First the chunks travel and are added up on their way, until each rank has one whole sum. Then
    these sums travel in the same direction, until all ranks have all of them.
    """

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.next, self.previous = (rank + 1) % ranks, (rank - 1) % ranks

    def exchange(self, chunk: Tensor) -> Tensor:
        received = torch.empty_like(chunk)
        sending = dist.isend(chunk.clone(), self.next)
        dist.recv(received, self.previous)
        sending.wait()
        return received

    def chunks(self, flat: Tensor) -> list[Tensor]:
        padding = -flat.numel() % self.ranks
        flat = torch.cat([flat, flat.new_zeros(padding)])
        return list(flat.chunk(self.ranks))

    def reduce_scatter(self, chunks: list[Tensor]) -> None:
        for hop in range(self.ranks - 1):
            leaves = (self.rank - hop) % self.ranks
            arrives = (self.rank - hop - 1) % self.ranks
            chunks[arrives] = chunks[arrives] + self.exchange(chunks[leaves])

    def all_gather(self, chunks: list[Tensor]) -> None:
        whole = self.rank
        for hop in range(self.ranks - 1):
            leaves = (whole - hop) % self.ranks
            arrives = (whole - hop - 1) % self.ranks
            chunks[arrives] = self.exchange(chunks[leaves])

    def average(self, flat: Tensor) -> Tensor:
        chunks = self.chunks(flat)
        self.reduce_scatter(chunks)
        self.all_gather(chunks)
        return torch.cat(chunks)[: flat.numel()] / self.ranks


def gradients_from(model: nn.Module, flat: Tensor) -> None:
    start = 0
    for parameter in model.parameters():
        end = start + parameter.numel()
        parameter.grad = flat[start:end].view_as(parameter).clone()
        start = end


def step(model: nn.Module, shard: dict, rank) -> None:
    loss(model, shard).backward()
    flat = parameters_to_vector([parameter.grad for parameter in model.parameters()])
    gradients_from(model, Ring(rank.rank, rank.world_size).average(flat))
