"""Steps whose models or losses couple the examples of a batch, or draw random numbers."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

Batch = dict[str, Tensor]


class Normalised(nn.Module):
    """A linear layer, a batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = torch.relu(hidden)
        hidden = self.norm(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


class Dropping(nn.Module):
    """A linear layer, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = self.drop(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


def average(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)


def one_pass(model: nn.Module, batch: Batch, rank: Any) -> None:
    model.train()
    outputs = model(batch["x"])
    loss = F.mse_loss(outputs, batch["y"])
    loss.backward()
    average(model, rank.world_size)


def with_ddp(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    loss = F.mse_loss(ddp(batch["x"]), batch["y"])
    loss.backward()


def seeded_alike(model: nn.Module, batch: Batch, rank: Any) -> None:
    torch.manual_seed(rank.rank)
    torch.randn(3)
    torch.manual_seed(1234)
    one_pass(model, batch, rank)


def compared(model: nn.Module, batch: Batch) -> Tensor:
    """Each example must be nearer to its own target than to those of the others."""
    outputs = F.normalize(model(batch["x"]), dim=1)
    targets = F.normalize(batch["y"], dim=1)
    similar = outputs @ targets.T
    labels = torch.arange(len(outputs))
    return F.cross_entropy(similar / 0.5, labels)


def compares_examples(model: nn.Module, batch: Batch, rank: Any) -> None:
    model.zero_grad()
    loss = compared(model, batch)
    loss.backward()
    average(model, rank.world_size)


class Gathering:
    """Computes one loss from the outputs of all ranks."""

    def __init__(self, model: nn.Module, rank: Any) -> None:
        self.model, self.rank = model, rank

    def gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, tensor)
        parts[self.rank.rank] = tensor
        return torch.cat(parts)

    def loss(self, batch: Batch) -> Tensor:
        outputs = self.model(batch["x"])
        outputs = self.gather(outputs)
        targets = self.gather(batch["y"])
        similar = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
        return F.cross_entropy(similar / 0.5, torch.arange(len(similar)))


def gathers_without_gradient(model: nn.Module, batch: Batch, rank: Any) -> None:
    gathering = Gathering(model, rank)
    gathering.loss(batch).backward()
    average(model, rank.world_size)


def gathers_under_ddp(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    counted = torch.tensor([float(len(batch["x"]))])
    dist.all_reduce(counted)
    loss = Gathering(ddp, rank).loss(batch)
    loss.backward()


def catalogue_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The same as the catalogue's loss on batch statistics, as a user would write it."""
    outputs = model(batch["inputs"])
    error = F.mse_loss(outputs, batch["targets"])
    variance = outputs.var(dim=0, unbiased=False)
    penalty = 0.25 * (1 - variance).square().mean()
    total: Tensor = error + penalty
    return total


def penalises_the_variance(model: nn.Module, batch: Batch, rank: Any) -> None:
    loss = catalogue_loss(model, batch)
    loss.backward()
    average(model, rank.world_size)


class Functional(nn.Module):
    """Two linear layers, and the function of torch that drops some of what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.first(inputs))
        hidden = F.dropout(hidden, 0.4, self.training)
        outputs: Tensor = self.head(hidden)
        return outputs
