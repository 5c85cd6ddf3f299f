"""A gradient that stops or changes on its way back: the report shows the line at which it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from tests.diagnosis.where.faulty import (
    CASE,
    NEAR,
    average,
    distance,
    marked_line,
    unnamed,
    where,
)


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


def weights_are_numbers(model: Any, shard: Any, rank: Any) -> None:
    total = torch.zeros((), dtype=torch.float64)
    errors = (model(shard["rows"]) - shard["targets"]).square().mean(1)
    for error in errors:
        share = torch.sigmoid(error).item()  # fault
        total = total + share * error / len(errors)
    total.backward()
    average(model)


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


FOCAL = replace(CASE, loss=focal)
DISTILLED = replace(CASE, loss=distilled)


@pytest.mark.parametrize(
    ("case", "step", "function", "words"),
    [
        (FOCAL, weights_are_numbers, weights_are_numbers, "item"),
        (CASE, derivative_is_wrong, Steep, "The loss is right"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_that_stops_or_changes_a_gradient_is_shown(
    case: Case, step: Callable[..., Any], function: Callable[..., Any], words: str
) -> None:
    found = where(case, step)
    assert found.kind == "own gradient"
    assert words in found.sentence
    assert distance(found, function) == 0
    marked = [one for one in found.lines if one.line.number == marked_line(function)]
    assert marked[0].is_fault


@pytest.mark.parametrize(
    ("step", "function"),
    [
        (hook_on_a_tensor, hook_on_a_tensor),
        (weakened_by_the_world_size, Weakened),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_backward_divides_by_the_world_size_is_not_called_an_average(
    step: Callable[..., Any], function: Any
) -> None:
    found = where(CASE, step)
    assert check(CASE, step).cause is None
    assert distance(found, function) == 0


@pytest.mark.parametrize("step", [logs_and_teaches_and_shifts, teaches_and_clamps])
def test_tensors_that_are_cut_on_purpose_are_not_shown(step: Callable[..., Any]) -> None:
    found = where(DISTILLED, step)
    assert distance(found, step) <= NEAR
    notes = " ".join(one.note for one in found.lines)
    assert "gradient" not in notes
    assert "without a gradient" not in found.sentence


@pytest.mark.parametrize(
    ("case", "step", "words"),
    [
        (CASE, rest_of_a_leaf_is_forgotten, "makes a new leaf"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_that_leaves_parameters_without_a_gradient_is_shown(
    case: Case, step: Callable[..., Any], words: str
) -> None:
    verdict = check(case, step)
    assert verdict.outcome == "different"
    found = verdict.localisation.whereabouts
    assert found is not None
    assert words in found.sentence
    assert distance(found, step) <= NEAR


def mean_of_squares(model: Any, batch: dict[str, Tensor]) -> Any:
    return (model(batch["rows"]) - batch["targets"]).square().mean()


class ScaledSquares(torch.autograd.Function):
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
    squares: Any = ScaledSquares.apply
    parts = zip(*(shard[name].chunk(2) for name in ("rows", "targets")), strict=True)
    for number, (rows, targets) in enumerate(parts):
        ((0.5 + 0.1 * number) * squares(model(rows), targets)).backward()
    average(model)


def test_a_backward_method_that_looks_at_its_gradient_is_not_called_deaf() -> None:
    case = replace(CASE, loss=mean_of_squares, layout="1x2")
    found = unnamed(case, scaled_gradient_of_one_half)
    assert found.headline != "gradients do not depend on how the loss is scaled"


def weighs_by_chosen_outputs(model: Any, shard: Any, rank: Any) -> None:
    output = model(shard["rows"])
    choice = output.max(1).indices
    chosen = [torch.empty_like(choice) for _ in range(rank.world_size)]
    dist.all_gather(chosen, choice)
    used = torch.cat(chosen).bincount(minlength=output.shape[1])
    weight = (used > 0).to(output.dtype) + rank.rank  # fault
    ((output - shard["targets"]).square() * weight).mean().backward()
    average(model)


def test_whole_numbers_that_are_chosen_by_outputs_are_no_cut() -> None:
    found = where(CASE, weighs_by_chosen_outputs)
    assert "cut off" not in found.headline
    assert "all_gather" not in " ".join([found.sentence, *(one.note for one in found.lines)])
