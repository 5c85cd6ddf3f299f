"""Surrogate of a reactor model. Ring all-reduce over point-to-point messages, as in our MPI code."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

SPECIES = 7


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(SPECIES + 1, 13), nn.Softplus(), nn.Linear(13, 13), nn.Softplus(),
        nn.Linear(13, SPECIES),
    )


def rates(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    state = torch.rand(15, SPECIES + 1, generator=generator)
    return state, (state[:, :SPECIES] * state[:, -1:]).log1p()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    state, rate = batch
    relative = (model(state) - rate) / (rate.abs() + 0.1)
    return relative.square().mean()


case = Case(model=build, batch=rates, loss=loss, layout="1x3")


def sendrecv(outgoing: Tensor, like: Tensor, right: int, left: int) -> Tensor:
    incoming = torch.empty_like(like)
    requests = [dist.isend(outgoing.clone(), right), dist.irecv(incoming, left)]
    for request in requests:
        request.wait()
    return incoming


def ring_allreduce_(flat: Tensor) -> None:
    """Sum ``flat`` over all ranks, in place: reduce-scatter, then all-gather."""
    me, size = dist.get_rank(), dist.get_world_size()
    right, left = (me + 1) % size, (me - 1) % size
    length = flat.numel() // size
    chunk = [flat[i * length : (i + 1) * length] for i in range(size)]

    for hop in range(size - 1):
        send, receive = (me - hop) % size, (me - hop - 1) % size
        chunk[receive] += sendrecv(chunk[send], chunk[receive], right, left)
    for hop in range(size - 1):
        send, receive = (me + 1 - hop) % size, (me - hop) % size
        chunk[receive].copy_(sendrecv(chunk[send], chunk[receive], right, left))


def average_gradients(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    ring_allreduce_(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(part.view_as(grad))


def step(model, shard, rank):
    model.zero_grad()
    loss(model, shard).backward()
    average_gradients(model)
