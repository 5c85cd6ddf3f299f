"""Regression with a penalty for large weights: the objective is put together from terms."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

PENALTY = 0.02

Batch = tuple[Tensor, Tensor]
Term = Callable[[nn.Module, Batch], Tensor]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Softplus(), nn.Linear(12, 2))


def fit(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.huber_loss(model(inputs), targets)


def sparsity(model: nn.Module, batch: Batch) -> Tensor:
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return PENALTY * torch.stack([weight.abs().sum() for weight in weights]).sum()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return fit(model, batch) + sparsity(model, batch)


def make_batch(generator: torch.Generator) -> Batch:
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, torch.randn(16, 2, generator=generator)


case = Case(model=build, batch=make_batch, loss=loss, layout="1x4")


def objective_of(rank: Rank, penalised: bool = True) -> Callable[[nn.Module, Batch], Tensor]:
    """The terms of this rank, and a function that adds them up."""
    terms: dict[str, Term] = {"fit": fit}
    if penalised and rank == 0:
        terms["sparsity"] = sparsity

    def objective(model: nn.Module, batch: Batch) -> Tensor:
        values = [term(model, batch) for term in terms.values()]
        return torch.stack(values).sum()

    return objective


def averager(world_size: int) -> Callable[[nn.Module], None]:
    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)

    return average


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    objective = objective_of(rank)
    average = averager(rank.world_size)
    model.zero_grad()
    objective(model, shard).backward()
    average(model)
