"""Steps that are wrong on any number of ranks, at the line marked ``# fault``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tests.diagnosis.where.faulty import average


def mean_of_squares(model: Any, batch: dict[str, Tensor]) -> Any:
    return (model(batch["rows"]) - batch["targets"]).square().mean()


class Kept(torch.autograd.Function):
    """The gradient is made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, targets: Tensor) -> Tensor:
        errors = output - targets
        ctx.save_for_backward(errors.mul(2).div(errors.numel()))
        return errors.square().mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return kept.clone(), None  # fault


def kept_gradient_of_a_half(model: Any, shard: Any, rank: Any) -> None:
    squares: Any = Kept.apply
    for rows, targets in zip(*(shard[name].chunk(4) for name in ("rows", "targets")), strict=True):
        (0.25 * squares(model(rows), targets)).backward()
    average(model)


def one_input_of_two(model: Any, shard: Any, rank: Any) -> None:
    class Product(torch.autograd.Function):
        """A linear layer."""

        @staticmethod
        def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(rows, weight)
            return rows @ weight.T

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            rows, weight = ctx.saved_tensors
            ones = torch.ones(len(rows), weight.shape[0], dtype=rows.dtype)
            return gradients[0] @ weight, ones.T @ rows  # fault

    product: Any = Product.apply
    rows = model.norm(model.first(shard["rows"])).tanh()
    hidden = product(rows, model.middle.weight) + model.middle.bias
    (model.head(hidden.tanh()) - shard["targets"]).square().mean().backward()
    average(model)


class Scaled(torch.autograd.Function):
    """A right one, which asks what it is given."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, targets: Tensor) -> Tensor:
        errors = output - targets
        ctx.save_for_backward(errors.mul(2).div(errors.numel()))
        return errors.square().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        if gradients[0].item() != 1:
            kept = kept * gradients[0].item()
        return kept, None


def scaled_gradient_of_one_half(model: Any, shard: Any, rank: Any) -> None:
    squares: Any = Scaled.apply
    parts = zip(*(shard[name].chunk(2) for name in ("rows", "targets")), strict=True)
    for number, (rows, targets) in enumerate(parts):
        ((0.5 + 0.1 * number) * squares(model(rows), targets)).backward()
    average(model)


def labelled(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(-1, 3, (12, 7), generator=generator)
    return {"rows": torch.randn(12, 7, 6, generator=generator), "labels": labels}


class Labeller(nn.Module):
    """Scores every place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, rows: Tensor) -> Any:
        return self.layer(rows)


def summed_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    scores, labels = model(batch["rows"])[:, 1:].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(scores, labels, ignore_index=-1, reduction="sum")


def labelled_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return summed_loss(model, batch) / batch["labels"][:, 1:].ne(-1).sum()


class Counts(NamedTuple):
    """What all ranks have."""

    labels: int
    rows: int

    @classmethod
    def of(cls, batch: dict[str, Tensor]) -> Counts:
        def labelled(row: Tensor) -> int:
            return int((row >= 0).sum())

        numbers = torch.tensor([sum(map(labelled, batch["labels"])), len(batch["labels"])])  # fault
        dist.all_reduce(numbers)
        return cls(*map(int, numbers))


def counts_of_a_class(model: Any, shard: Any, rank: Any) -> None:
    counts = Counts.of(shard)
    (summed_loss(model, shard) / counts.labels).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def sizes(shard: dict[str, Tensor], world_size: int) -> tuple[int, int]:
    rows, places = shard["labels"].shape
    return rows, rows * places * world_size  # fault


def places_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    rows, places = batch["labels"].shape
    return summed_loss(model, batch) / (rows * (places - 1))


def count_of_a_helper(model: Any, shard: Any, rank: Any) -> None:
    _, count = sizes(shard, rank.world_size)
    value = summed_loss(model, shard) / count
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
