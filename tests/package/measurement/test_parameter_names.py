"""Parameters keep the names that they had before the step, whatever a step wraps or renames."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.package.own_cases import loss, own_case, right_step

Returned = Mapping[str, Tensor | None]


class TwoParts(nn.Module):
    """An encoder and a head, of which steps wrap one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.encoder(rows))  # type: ignore[no-any-return]


class Renaming(nn.Module):
    """A wrapper of somebody's own, with a segment of its own in every name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows)  # type: ignore[no-any-return]


def two_parts(**changes: Any) -> Any:
    return own_case(model=TwoParts, **changes)


def both_parts_under_ddp(model: Any, shard: Any, rank: Rank) -> None:
    model.encoder = DistributedDataParallel(model.encoder)
    model.head = DistributedDataParallel(model.head)
    loss(model, shard).backward()


def checkpointed_part(model: Any, shard: Any, rank: Rank) -> None:
    model.encoder = checkpoint_wrapper(model.encoder)
    right_step(model, shard, rank)


def part_in_a_wrapper_of_ones_own(model: Any, shard: Any, rank: Rank) -> None:
    model.encoder = Renaming(model.encoder)
    right_step(model, shard, rank)


def part_that_moves_up(model: Any, shard: Any, rank: Rank) -> None:
    """The names "encoder.0.weight" become "encoder.1.weight"."""
    model.encoder = nn.Sequential(nn.Identity(), *model.encoder)
    right_step(model, shard, rank)


def swapped_names(model: Any, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    model.encoder, model.head = model.head, model.encoder


def parameters_replaced_before_wrapping(model: Any, shard: Any, rank: Rank) -> None:
    model.encoder = Renaming(model.encoder)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().clone())
            module.bias = nn.Parameter(module.bias.detach().clone())
    model.encoder = model.encoder.inner
    right_step(model, shard, rank)


def copy_of_a_part_under_ddp(model: Any, shard: Any, rank: Rank) -> None:
    model.encoder = DistributedDataParallel(copy.deepcopy(model.encoder))
    model.head = DistributedDataParallel(copy.deepcopy(model.head))
    loss(model, shard).backward()


def swapped_tensors(model: Any, shard: Any, rank: Rank) -> None:
    """torch.utils.swap_tensors refuses tensors that have weak references."""
    model.encoder = Renaming(model.encoder)
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
    right_step(model, shard, rank)


RENAMING = (
    swapped_tensors,
    both_parts_under_ddp,
    checkpointed_part,
    part_in_a_wrapper_of_ones_own,
    part_that_moves_up,
    swapped_names,
    parameters_replaced_before_wrapping,
    copy_of_a_part_under_ddp,
)


@pytest.mark.parametrize("step", RENAMING)
def test_a_parameter_that_the_step_renames_is_compared_under_its_own_name(step: Any) -> None:
    def doubles_one(model: Any, shard: Any, rank: Rank) -> None:
        first = model.encoder[0].weight
        step(model, shard, rank)
        parts = [one for one in model.parameters() if one.shape == first.shape]
        for parameter in parts:
            assert parameter.grad is not None
            parameter.grad *= 2

    verdict = check(two_parts(), doubles_one)
    assert verdict.comparison is not None
    names = ["encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias"]
    assert [one.name for one in verdict.comparison.parameters] == names
    assert [one.name for one in verdict.comparison.differing] == names[:1]
    assert not verdict.comparison.structure


class Once:
    """Renames in the first of several steps, as a training script does before its loop."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.wrap = wrap
        self.ddp: dict[nn.Module, DistributedDataParallel] = {}

    def __call__(self, model: Any, shard: Any, rank: Rank) -> None:
        if model not in self.ddp:
            model.encoder = self.wrap(model.encoder)
            self.ddp[model] = DistributedDataParallel(model)
        loss(self.ddp[model], shard).backward()


@pytest.mark.parametrize("wrap", [Renaming, copy.deepcopy])
def test_several_steps_may_follow_a_renaming(wrap: Any) -> None:
    verdict = check(two_parts(), Once(wrap), steps=3)
    assert verdict.outcome == "same", verdict


def train(model: nn.Module, shard: Any, forward: nn.Module | None = None) -> None:
    ddp = DistributedDataParallel(model if forward is None else forward)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for part in range(2):
        optimizer.zero_grad()
        loss(ddp, {name: leaf.chunk(2)[part] for name, leaf in shard.items()}).backward()
        optimizer.step()


def trains_a_wrapped_part(model: Any, shard: Any, rank: Rank) -> None:
    model.encoder = torch.compile(Renaming(model.encoder), backend="eager")
    train(model, shard)


def trains_and_freezes(model: Any, shard: Any, rank: Rank) -> None:
    train(model, shard)
    model.requires_grad_(False)


def returns_the_weights_of_a_copy(model: Any, shard: Any, rank: Rank) -> Returned:
    trained = copy.deepcopy(model)
    trained.encoder = torch.compile(trained.encoder, backend="eager")
    train(trained, shard)
    return trained.state_dict()  # type: ignore[no-any-return]


def returns_the_weights_of_the_wrapper(model: Any, shard: Any, rank: Rank) -> Returned:
    ddp = DistributedDataParallel(torch.compile(model, backend="eager"))
    train(model, shard)
    return ddp.state_dict()


TRAINERS = (
    trains_a_wrapped_part,
    trains_and_freezes,
    returns_the_weights_of_a_copy,
    returns_the_weights_of_the_wrapper,
)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_updates_are_compared_under_the_models_own_names(trainer: Any) -> None:
    verdict = check(two_parts(), trainer, compare="update", lr=0.05, steps=2)
    assert verdict.outcome == "same", verdict
    assert check(two_parts(), trainer, compare="update", lr=0.1, steps=2).outcome == "different"


def test_a_frozen_parameter_that_moves_is_seen() -> None:
    class FrozenHead(TwoParts):
        def __init__(self) -> None:
            super().__init__()
            self.head.requires_grad_(False)

    def moves_what_is_frozen(model: Any, shard: Any, rank: Rank) -> None:
        train(model, shard)
        with torch.no_grad():
            model.head.weight += 1

    options: Any = {"compare": "update", "lr": 0.05, "steps": 2}
    right = check(
        own_case(model=FrozenHead), lambda model, shard, rank: train(model, shard), **options
    )
    assert right.outcome == "same", right
    wrong = check(own_case(model=FrozenHead), moves_what_is_frozen, **options)
    assert wrong.outcome == "different", wrong
    assert "head.weight" in str(wrong)


def gradients_of_a_wrapper(model: nn.Module, shard: Any) -> dict[str, Tensor | None]:
    model.encoder = checkpoint_wrapper(model.encoder)  # type: ignore[arg-type]
    compiled: Any = torch.compile(model, backend="eager")
    ddp = DistributedDataParallel(compiled)
    loss(ddp, shard).backward()
    return {name: parameter.grad for name, parameter in ddp.named_parameters()}


def returns_the_names_of_wrappers(model: nn.Module, shard: Any, rank: Rank) -> Returned:
    found = gradients_of_a_wrapper(model, shard)
    assert "module._orig_mod.encoder._checkpoint_wrapped_module.0.weight" in found
    return found


def returns_the_names_of_wrappers_of_a_copy(model: nn.Module, shard: Any, rank: Rank) -> Returned:
    return gradients_of_a_wrapper(copy.deepcopy(model), shard)


def returns_the_names_that_the_model_has_now(model: Any, shard: Any, rank: Rank) -> Returned:
    part_in_a_wrapper_of_ones_own(model, shard, rank)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "step",
    [
        returns_the_names_of_wrappers,
        returns_the_names_of_wrappers_of_a_copy,
        returns_the_names_that_the_model_has_now,
    ],
)
def test_names_that_wrappers_give_are_matched_to_the_models_own(step: Any) -> None:
    verdict = check(two_parts(), step)
    assert verdict.outcome == "same", verdict


class NamedLikeAWrapper(nn.Module):
    """Without the segment "module", both names would be "weight"."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(5))
        self.module = nn.Linear(5, 3, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.module(rows @ self.weight)  # type: ignore[no-any-return]


def test_a_models_own_segment_that_a_wrapper_also_uses_is_not_dropped() -> None:
    verdict = check(own_case(model=NamedLikeAWrapper), right_step)
    assert verdict.outcome == "same", verdict


def test_what_wrappers_of_the_whole_model_put_in_front_is_dropped_from_all_names_alike() -> None:
    def returns_wrapped_names(model: Any, shard: Any, rank: Rank) -> Returned:
        ddp = DistributedDataParallel(torch.compile(model, backend="eager"))
        loss(ddp, shard).backward()
        return {name: parameter.grad for name, parameter in ddp.named_parameters()}

    verdict = check(own_case(model=NamedLikeAWrapper), returns_wrapped_names)
    assert verdict.outcome == "same", verdict


def test_names_that_fit_two_parameters_are_an_error() -> None:
    def returns_wrapped_names(model: Any, shard: Any, rank: Rank) -> Returned:
        copied = copy.deepcopy(model)
        copied.module = checkpoint_wrapper(copied.module)
        ddp = DistributedDataParallel(copied)
        loss(ddp, shard).backward()
        return {name: parameter.grad for name, parameter in ddp.named_parameters()}

    verdict = check(own_case(model=NamedLikeAWrapper), returns_wrapped_names)
    assert verdict.outcome == "unknown"
    assert "could be weight or module.weight" in " ".join(verdict.full_report().split())


def test_a_parameter_replaced_after_wrapping_is_still_seen() -> None:
    def replaces(model: Any, shard: Any, rank: Rank) -> None:
        model.encoder = Renaming(model.encoder)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        linear = model.encoder.inner[0]
        linear.weight = nn.Parameter(linear.weight.detach().clone())
        loss(ddp, shard).backward()

    verdict = check(two_parts(), replaces)
    assert verdict.cause == "parameter_not_reduced", verdict
    assert verdict.comparison is not None
    assert [one.name for one in verdict.comparison.differing] == ["encoder.0.weight"]
