"""Steps in which a rank's own gradient is not what its rows give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.whereabouts.faulty import Small, average, loss


def labels_shifted_on_one_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    targets = shard["targets"]
    if rank.rank == 1:
        targets = targets.roll(1, 0)  # fault
    output = ddp(shard["rows"])
    nn.functional.mse_loss(output, targets).backward()


def noise_by_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    rows = shard["rows"]
    rows = rows + 0.1 * rank.rank * torch.randn_like(rows)  # fault
    value = nn.functional.mse_loss(ddp(rows), shard["targets"])
    value.backward()


def loss_weight_on_one_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    value = loss(model, shard)
    if rank.rank == 2:
        value = 1.75 * value  # fault
    value.backward()
    average(model)


def penalty_on_one_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    value = loss(ddp, shard)
    if rank.rank == 3:
        value = value + 0.01 * model.head.weight.square().sum()  # fault
    value.backward()


def detached_on_one_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    hidden = torch.tanh(model.norm(hidden))
    if rank.rank == 1:
        hidden = hidden.detach() + 0 * hidden  # fault
    output = model.head(torch.tanh(model.middle(hidden)))
    value = nn.functional.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


class LowerOnOneRank(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: Tensor) -> Tensor:
        low = nn.functional.linear(
            rows.bfloat16(), self.layer.weight.bfloat16(), self.layer.bias.bfloat16()
        )
        return low.to(rows.dtype)


def another_dtype_in_one_layer(model: nn.Module, shard: Any, rank: Any) -> None:
    hidden = torch.tanh(model.norm(model.first(shard["rows"])))
    if rank.rank == 3:
        hidden = hidden.to(torch.bfloat16).to(hidden.dtype)  # fault
    output = model.head(torch.tanh(model.middle(hidden)))
    nn.functional.mse_loss(output, shard["targets"]).backward()
    average(model)


def activations_changed_in_place(model: nn.Module, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    if rank.rank == 2:
        hidden.clamp_(min=-0.1)  # fault
    hidden = torch.tanh(model.norm(hidden))
    output = model.head(torch.tanh(model.middle(hidden)))
    nn.functional.mse_loss(output, shard["targets"]).backward()
    average(model)


def forward_hook_on_one_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    if rank.rank == 1:
        model.middle.register_forward_hook(lambda _, given, out: 1.1 * out)  # fault
    value = loss(ddp, shard)
    value.backward()


def gradient_hook_on_a_module(model: nn.Module, shard: Any, rank: Any) -> None:
    if rank.rank == 0:
        model.middle.register_full_backward_hook(lambda _, given, out: (2 * given[0],))  # fault
    value = loss(model, shard)
    value.backward()
    average(model)


def another_loss_on_one_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    output = model(shard["rows"])
    if rank.rank == 0:
        value = nn.functional.smooth_l1_loss(output, shard["targets"])  # fault
    else:
        value = nn.functional.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


def rows_normalised_by_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    rows = shard["rows"]
    rows = (rows - rows.mean(0)) / rows.std(0)  # fault
    value = nn.functional.mse_loss(model(rows), shard["targets"])
    value.backward()
    average(model)


def targets_of_the_second_micro_batch(model: nn.Module, shard: Any, rank: Any) -> None:
    for number in range(2):
        rows = shard["rows"][2 * number : 2 * number + 2]
        targets = shard["targets"][:2]  # fault
        value = nn.functional.mse_loss(model(rows), targets) / 2
        value.backward()
    average(model)


def class_weights_by_rank(model: nn.Module, shard: Any, rank: Any) -> None:
    output = model(shard["rows"])
    counts = (shard["targets"] > 0).sum(0) + 1
    weights = counts.sum() / (3 * counts)  # fault
    value = (weights * (output - shard["targets"]).square()).mean()
    value.backward()
    average(model)


def output_scaled(model: nn.Module, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    output = ddp(shard["rows"])
    if rank.rank % 2:
        output = 0.9 * output  # fault
    value = nn.functional.mse_loss(output, shard["targets"])
    value.backward()


class WithDropout(Small):
    """Drops half of the rows' features in training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.RReLU(0.1, 0.9)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.scale(self.first(rows)))
