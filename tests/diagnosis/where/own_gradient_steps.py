"""Steps in which a rank's own gradient is not what its rows give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.where.faulty import Small, average, loss


def labels_shifted_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    targets = shard["targets"]
    if rank.rank == 1:
        targets = targets.roll(1, 0)  # fault
    output = ddp(shard["rows"])
    nn.functional.mse_loss(output, targets).backward()


def loss_weight_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    value = loss(model, shard)
    if rank.rank == 2:
        value = 1.75 * value  # fault
    value.backward()
    average(model)


def detached_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    hidden = torch.tanh(model.norm(hidden))
    if rank.rank == 1:
        hidden = hidden.detach() + 0 * hidden  # fault
    output = model.head(torch.tanh(model.middle(hidden)))
    value = nn.functional.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


def activations_changed_in_place(model: Any, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    if rank.rank == 2:
        hidden.clamp_(min=-0.1)  # fault
    hidden = torch.tanh(model.norm(hidden))
    output = model.head(torch.tanh(model.middle(hidden)))
    nn.functional.mse_loss(output, shard["targets"]).backward()
    average(model)


def gradient_hook_on_a_module(model: Any, shard: Any, rank: Any) -> None:
    if rank.rank == 0:
        model.middle.register_full_backward_hook(lambda _, given, out: (2 * given[0],))  # fault
    value = loss(model, shard)
    value.backward()
    average(model)


def another_loss_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    output = model(shard["rows"])
    if rank.rank == 0:
        value = nn.functional.smooth_l1_loss(output, shard["targets"])  # fault
    else:
        value = nn.functional.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


def rows_normalised_by_rank(model: Any, shard: Any, rank: Any) -> None:
    rows = shard["rows"]
    rows = (rows - rows.mean(0)) / rows.std(0)  # fault
    value = nn.functional.mse_loss(model(rows), shard["targets"])
    value.backward()
    average(model)


def targets_of_the_second_micro_batch(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        rows = shard["rows"][2 * number : 2 * number + 2]
        targets = shard["targets"][:2]  # fault
        value = nn.functional.mse_loss(model(rows), targets) / 2
        value.backward()
    average(model)


def class_weights_by_rank(model: Any, shard: Any, rank: Any) -> None:
    output = model(shard["rows"])
    counts = (shard["targets"] > 0).sum(0) + 1
    weights = counts.sum() / (3 * counts)  # fault
    value = (weights * (output - shard["targets"]).square()).mean()
    value.backward()
    average(model)


class Dropping(Small):
    """With dropout, which the case turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, rows: Tensor) -> Any:
        return self.head(self.drop(torch.tanh(self.first(rows))))


def dropout_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    if rank.rank == 1:
        model.drop.p = 0.3  # fault
    value = loss(ddp, shard)
    value.backward()


class Normalising(nn.Module):
    """With a batch norm in evaluation mode, whose statistics are its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8).eval()
        self.head = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Any:
        return self.head(torch.tanh(self.norm(self.first(rows))))


def training_mode_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    if rank.rank == 2:
        model.train()  # fault
    value = loss(model, shard)
    value.backward()
    average(model)


def module_skipped_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    if rank.rank != 1:
        hidden = model.norm(hidden)  # fault
    output = model.head(torch.tanh(model.middle(torch.tanh(hidden))))
    nn.functional.mse_loss(output, shard["targets"]).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average(model)
