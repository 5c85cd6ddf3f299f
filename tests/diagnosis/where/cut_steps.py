"""Steps whose values are right, and whose gradient stops or changes on its way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.where.faulty import average, loss


def focal(model: Callable[[Tensor], Tensor], examples: dict[str, Tensor]) -> Any:
    """A loss in which an example that is further off counts more."""
    errors = (model(examples["rows"]) - examples["targets"]).square().mean(1)
    return (errors * torch.sigmoid(errors)).mean()


def distilled(model: Any, examples: dict[str, Tensor]) -> Any:
    """The outputs must be near what the model gave before, which is to stay as it was."""
    with torch.no_grad():
        old = model(examples["rows"] + 1)
    output = model(examples["rows"])
    return nn.functional.mse_loss(output, old) + nn.functional.mse_loss(output, examples["targets"])


def weights_are_constants(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    errors = (ddp(shard["rows"]) - shard["targets"]).square().mean(1)
    certainty = torch.sigmoid(errors.data)  # fault
    value = (errors * certainty).mean()
    value.backward()


def weights_are_numbers(model: Any, shard: Any, rank: Any) -> None:
    total = torch.zeros((), dtype=torch.float64)
    errors = (model(shard["rows"]) - shard["targets"]).square().mean(1)
    for error in errors:
        share = torch.sigmoid(error).item()  # fault
        total = total + share * error / len(errors)
    total.backward()
    average(model)


def weights_without_gradients(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    errors = (ddp(shard["rows"]) - shard["targets"]).square().mean(1)
    with torch.no_grad():
        certainty = torch.sigmoid(errors)  # fault
    value = (errors * certainty).mean()
    value.backward()


class Steep(torch.autograd.Function):
    """Tanh, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        result = torch.tanh(values)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        slope = 1 - result
        return gradients[0] * slope  # fault


def applied(function: Any, *tensors: Tensor) -> Any:
    return function.apply(*tensors)


def derivative_is_wrong(model: Any, shard: Any, rank: Any) -> None:
    hidden = applied(Steep, model.norm(model.first(shard["rows"])))
    output = model.head(torch.tanh(model.middle(hidden)))
    nn.functional.mse_loss(output, shard["targets"]).backward()
    average(model)


class Product(torch.autograd.Function):
    """The product of two tensors."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, other = ctx.saved_tensors
        return gradients[0] * other, None  # fault


def one_factor_gets_no_gradient(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    errors = (ddp(shard["rows"]) - shard["targets"]).square().mean(1)
    applied(Product, errors, torch.sigmoid(errors)).mean().backward()


def logs_and_teaches_and_shifts(model: Any, shard: Any, rank: Any) -> None:
    """What it detaches is meant; its fault is another."""
    rows = shard["rows"]
    with torch.no_grad():
        old = model(rows + 1)
    output = model(rows)
    history = [output.detach().norm().item()]
    history.append(float(output.data.mean()))
    targets = shard["targets"].roll(1, 0)  # fault
    value = nn.functional.mse_loss(output, old) + nn.functional.mse_loss(output, targets)
    value.backward()
    average(model)


def teaches_and_clamps(model: Any, shard: Any, rank: Any) -> None:
    """What it detaches is meant; its fault is a hook."""
    with torch.no_grad():
        old = model(shard["rows"] + 1)
    model.middle.register_full_backward_hook(
        lambda module, given, gradients: (given[0].clamp(-1e-3, 1e-3),)  # fault
    )
    output = model(shard["rows"])
    value = nn.functional.mse_loss(output, old)
    value = value + nn.functional.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


def first_layer_without_gradients(model: Any, shard: Any, rank: Any) -> None:
    with torch.no_grad():
        hidden = model.first(shard["rows"])  # fault
    hidden = torch.tanh(model.norm(hidden))
    output = model.head(torch.tanh(model.middle(hidden)))
    nn.functional.mse_loss(output, shard["targets"]).backward()
    average_those_there_are(model)


def head_is_frozen(model: Any, shard: Any, rank: Any) -> None:
    def freeze(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.requires_grad_(False)  # fault

    freeze(model.head)
    loss(model, shard).backward()
    average_those_there_are(model)


def rest_of_a_leaf_is_forgotten(model: Any, shard: Any, rank: Any) -> None:
    hidden = torch.tanh(model.norm(model.first(shard["rows"])))
    given = hidden.detach().requires_grad_()  # fault
    output = model.head(torch.tanh(model.middle(given)))
    value = nn.functional.mse_loss(output, shard["targets"])

    value.backward()
    average_those_there_are(model)


def hook_on_a_tensor(model: Any, shard: Any, rank: Any) -> None:
    hidden = torch.tanh(model.norm(model.first(shard["rows"])))
    hidden.register_hook(lambda gradient: gradient / 4)  # fault
    output = model.head(torch.tanh(model.middle(hidden)))

    value = nn.functional.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


class Weakened(torch.autograd.Function):
    """The same values, and a smaller gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / 4  # fault


def weakened_by_the_world_size(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    output = applied(Weakened, ddp(shard["rows"]))
    nn.functional.mse_loss(output, shard["targets"]).backward()


def average_those_there_are(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Branches(nn.Module):
    """Has a second head, which is for training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.gain = 0.5

    def forward(self, rows: Tensor) -> Any:
        hidden = self.body(rows)
        first, second = (head(hidden) for head in self.heads)
        return first + self.gain * second if self.training else first


def left_in_evaluation_mode(model: Any, shard: Any, rank: Any) -> None:
    def losses_of(rows: Any) -> float:
        model.train(False)  # fault
        with torch.no_grad():
            return float(loss(model, rows))

    losses_of(shard)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss(ddp, shard).backward()


def another_gain(model: Any, shard: Any, rank: Any) -> None:
    model.gain = 0.7  # fault
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
