"""Steps whose ranks begin with different weights."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = dict[str, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["x"])
    return nn.functional.mse_loss(outputs, batch["y"])


def average(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def initialise(model: nn.Module) -> None:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.2)
            layer.bias.data.fill_(0.1)


def seeds_by_rank(model: nn.Module, batch: Batch, rank: Any) -> None:
    torch.manual_seed(7)
    torch.manual_seed(100 + rank.rank)
    initialise(model)
    loss = loss_of(model, batch)
    loss.backward()
    average(model, rank.world_size)


def loads_on_rank_0(model: nn.Module, batch: Batch, rank: Any) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * 2 for name, value in state.items()})
    if rank.rank == 0:
        model.load_state_dict(state)
    loss_of(model, batch).backward()
    average(model, rank.world_size)


def broadcasts_only_matrices(model: nn.Module, batch: Batch, rank: Any) -> None:
    torch.manual_seed(rank.rank)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            dist.broadcast(parameter.data, 0)
    loss_of(model, batch).backward()
    average(model, rank.world_size)
