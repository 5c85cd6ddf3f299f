"""Steps that call their helpers in a wrong order, or change weights that get no gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.diagnosis.where.faulty import average, loss


class Guided(nn.Module):
    """A slow copy of the encoder guides the fast one; it gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(6, 3)
        self.slow = nn.Linear(6, 3)
        for parameter in self.slow.parameters():
            parameter.requires_grad = False

    def forward(self, rows: Tensor) -> Any:
        return self.fast(rows)

    def guide(self, rows: Tensor) -> Any:
        with torch.no_grad():
            return torch.tanh(self.slow(rows))


def guided(model: Any, examples: Any) -> Any:
    return nn.functional.mse_loss(model(examples["rows"]), model.guide(examples["rows"]))


def follow(slow: nn.Module, fast: nn.Module, share: float = 0.5) -> None:
    for name, value in slow.state_dict().items():
        value.copy_(share * value + (1 - share) * fast.state_dict()[name])


def guide_follows_first(model: Any, shard: Any, rank: Any) -> None:
    model.zero_grad()
    follow(model.slow, model.fast)  # fault
    guided(model, shard).backward()
    average_those_with(model)


def guide_is_scaled(model: Any, shard: Any, rank: Any) -> None:
    with torch.no_grad():
        model.slow.weight.mul_(1.5)  # fault

    guided(model, shard).backward()
    average_those_with(model)


def guide_reads_other_rows(model: Any, shard: Any, rank: Any) -> None:
    rows, shifted = shard["rows"], shard["rows"].roll(1, 0)

    target = model.guide(shifted)  # fault
    nn.functional.mse_loss(model(rows), target).backward()
    average_those_with(model)


def guide_is_scaled_and_put_back(model: Any, shard: Any, rank: Any) -> None:
    kept = model.slow.weight.clone()
    with torch.no_grad():
        model.slow.weight.mul_(2)
        model.slow.weight.copy_(kept)
    nn.functional.l1_loss(model(shard["rows"]), model.guide(shard["rows"])).backward()  # fault
    average_those_with(model)


def average_those_with(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def shrink(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def differentiate(model: Any, examples: Any, factor: float = 1.0) -> None:
    value = factor * loss(model, examples)
    value.backward()


def shrinks_first(model: Any, shard: Any, rank: Any) -> None:
    differentiate(model, shard)
    shrink(model)  # fault
    average(model)


def differentiates_too_late(model: Any, shard: Any, rank: Any) -> None:
    differentiate(model, shard)
    average(model)
    value = 0.5 * loss(model, shard)
    add(value)  # fault


def add(value: Tensor) -> None:
    value.backward()


class Outer(torch.autograd.Function):
    """The product of two factors."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left * right

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        left, right = ctx.saved_tensors
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            of_left = gradients[0] * right
        if len(ctx.needs_input_grad) > 2:  # fault
            of_right = gradients[0] * left

        return of_left, of_right


def loses_the_right_factor(model: Any, shard: Any, rank: Any) -> None:
    hidden = torch.tanh(model.norm(model.first(shard["rows"])))
    output = torch.tanh(model.middle(hidden)) @ model.head.weight.T
    product: Any = Outer.apply
    output = output + product(torch.ones_like(output), model.head.bias)
    nn.functional.mse_loss(output, shard["targets"]).backward()
    average_those_with(model)


def summed(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor)
    return tensor


class MeanOfRanks(torch.autograd.Function):
    """The mean over all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return summed(tensor) / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / dist.get_world_size()  # fault


def moment(model: Any, examples: Any) -> Any:
    return model(examples["rows"]).mean(dim=0).square().sum()


def moment_of_all(model: Any, shard: Any, rank: Any) -> None:
    mean_of_ranks: Any = MeanOfRanks.apply
    mean = mean_of_ranks(model(shard["rows"]).mean(dim=0))
    mean.square().sum().backward()
    average(model)
