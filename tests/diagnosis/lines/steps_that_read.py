"""Steps that give their ranks other examples than right ones do."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Batch = dict[str, Tensor]


def all_reduce_gradients(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


class Trainer:
    """Trains on the part of the data that a subclass chooses."""

    def __init__(self, model: nn.Module, rank: Any) -> None:
        self.model = model
        self.rank = rank

    def part_of(self, batch: Batch) -> Batch:
        size = len(batch["x"]) // self.rank.world_size
        start = self.rank.rank * size
        return {name: leaf[start : start + size] for name, leaf in batch.items()}

    def step(self, batch: Batch) -> None:
        mine = self.part_of(batch)
        loss = loss_of(self.model, mine)
        loss.backward()
        all_reduce_gradients(self.model, self.rank.world_size)


class FirstPartTrainer(Trainer):
    def part_of(self, batch: Batch) -> Batch:
        size = len(batch["x"]) // self.rank.world_size
        start = self.rank.node * size
        return {name: leaf[start : start + size] for name, leaf in batch.items()}


def every_rank_takes_the_first_part(model: nn.Module, batch: Batch, rank: Any) -> None:
    FirstPartTrainer(model, rank).step(batch)


def loaded(batch: Batch, sampler: Any, size: int, drop_last: bool = False) -> Iterator[Batch]:
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=drop_last)
    for inputs, targets in loader:
        yield {"x": inputs, "y": targets}


def no_sampler(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=len(data) // rank.world_size)
    inputs, targets = next(iter(loader))
    outputs = ddp(inputs)
    loss = nn.functional.mse_loss(outputs, targets)
    loss.backward()


def sampler_of_rank_0(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    world_size = dist.get_world_size()
    sampler = DistributedSampler(data, world_size, rank=rank.node, shuffle=False)
    for part in loaded(batch, sampler, len(sampler)):
        loss_of(ddp, part).backward()


def sampler_that_pads(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False)
    sampler.set_epoch(0)
    for part in loaded(batch, sampler, len(sampler)):
        loss = loss_of(ddp, part)
        loss.backward()


def sampler_that_drops(model: nn.Module, batch: Batch, rank: Any) -> None:
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    for part in loaded(batch, sampler, len(sampler), drop_last=True):
        loss_of(model, part).backward()
    all_reduce_gradients(model, rank.world_size)


def loader_that_drops(model: nn.Module, batch: Batch, rank: Any) -> None:
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=3, drop_last=True)
    model.zero_grad()
    for inputs, targets in loader:
        loss = loss_of(model, {"x": inputs, "y": targets}) / len(loader)
        loss.backward()
    all_reduce_gradients(model, rank.world_size)


class Padded(Trainer):
    def part_of(self, batch: Batch) -> Batch:
        count, ranks = len(batch["x"]), self.rank.world_size
        indices = list(range(count))
        while len(indices) % ranks:
            indices.append(indices[len(indices) - count])
        own = torch.tensor(indices[self.rank.rank :: ranks])
        return {name: leaf[own] for name, leaf in batch.items()}


def padded_by_hand(model: nn.Module, batch: Batch, rank: Any) -> None:
    trainer = Padded(model, rank)
    trainer.step(batch)


def cut_to_an_even_length(model: nn.Module, batch: Batch, rank: Any) -> None:
    inputs, targets = batch["x"], batch["y"]
    count = len(inputs) - len(inputs) % 2
    inputs, targets = inputs[:count], targets[:count]
    loss = loss_of(model, {"x": inputs, "y": targets})
    loss.backward()
    all_reduce_gradients(model, rank.world_size)
