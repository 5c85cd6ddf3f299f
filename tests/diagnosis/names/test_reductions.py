"""What a report says of reductions was seen: their tensors, their groups, and their wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_

from ddp_equivalence import Rank, check
from tests.diagnosis.names.small_case import Step, average, case, checked, report_of
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check

WITHOUT_REDUCTION = (
    "no_all_reduce",
    "no_sync_left_on",
    "raw_module_called",
    "wrapper_dropped",
    "parameters_reduced_not_gradients",
)
"""The causes that say that no gradient was reduced."""


def flat_buffer_is_not_copied_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    flat = nn.utils.parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None)
    dist.all_reduce(flat)
    flat /= rank.world_size


def noise_is_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(torch.randn_like(parameter))


@pytest.mark.parametrize(
    "step",
    [
        flat_buffer_is_not_copied_back,
        noise_is_reduced,
    ],
)
@pytest.mark.parametrize("second_look", [True, False])
def test_where_as_much_as_the_model_was_reduced_it_is_never_said_that_no_gradient_was(
    step: Step, second_look: bool
) -> None:
    verdict = checked(case(), step, second_look)
    assert verdict.outcome == "different"
    assert not set(verdict.causes) & set(WITHOUT_REDUCTION), verdict
    assert "No gradient was reduced" not in report_of(verdict)


def parameters_are_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= rank.world_size


def test_parameters_that_were_reduced_are_named_and_counted() -> None:
    verdict = check(case(), parameters_are_reduced)
    assert verdict.causes == ("parameters_reduced_not_gradients",), verdict
    assert "4 parameters were all-reduced, and no gradient" in report_of(verdict)


def nothing_is_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    dist.all_reduce(torch.zeros(3, dtype=torch.int64))  # a count of something


def test_a_count_that_is_reduced_is_no_gradient() -> None:
    verdict = check(case(), nothing_is_reduced)
    assert verdict.causes == ("no_all_reduce",), verdict


def wraps_in_the_group_of_the_node(model: nn.Module, shard: Any, rank: Rank) -> None:
    groups = [dist.new_group([2 * node, 2 * node + 1]) for node in range(2)]
    ddp = DistributedDataParallel(model, process_group=groups[rank.node])
    squares(ddp, shard).backward()


def shards_in_the_group_of_the_node(model: nn.Module, shard: Any, rank: Rank) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    fully_shard(model, mesh=mesh["inside"])
    squares(model, shard).backward()
    sharded: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {name: gradient.full_tensor() for name, gradient in sharded.items()}


def reduces_in_the_group_of_the_node(model: nn.Module, shard: Any, rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    squares(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh["inside"].get_group())
        parameter.grad /= 2


@pytest.mark.parametrize(
    "step",
    [
        wraps_in_the_group_of_the_node,
        shards_in_the_group_of_the_node,
        reduces_in_the_group_of_the_node,
    ],
)
def test_gradients_that_stay_in_their_node_were_reduced(step: Any) -> None:
    verdict = check(case("2x2"), step)
    assert verdict.outcome == "different"
    assert not set(verdict.causes) & set(WITHOUT_REDUCTION), verdict
    assert "No gradient was reduced" not in report_of(verdict)


def all_layers_afterwards(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The second backward runs after DDP has reduced."""
    ddp = DistributedDataParallel(model)
    F.mse_loss(ddp(shard["rows"]), shard["targets"]).backward()
    (0.1 * model(shard["rows"]).square().mean()).backward()


def with_small_outputs(model: Any, batch: Any) -> Any:
    return squares(model, batch) + 0.1 * model(batch["rows"]).square().mean()


def test_a_backward_after_the_reduction_gets_no_hint_that_nothing_was_reduced() -> None:
    verdict = check(case("1x4", loss=with_small_outputs), all_layers_afterwards)
    assert verdict.outcome == "different"
    assert not set(verdict.causes) & set(WITHOUT_REDUCTION), verdict


def unlike_factors(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The shares of the ranks are 3 and 1/3 in one layer, and 1/3 and 3 in the other."""
    for place, parameter in enumerate(model.parameters()):
        factors = (3, 1 / 3) if place < 2 else (1 / 3, 3)
        parameter.register_hook(lambda gradient, factors=factors: gradient * factors[rank.rank % 2])
    squares(model, shard).backward()
    average(model, rank.world_size)


def test_modules_that_hold_other_shares_of_all_ranks_are_not_called_unreduced() -> None:
    verdict = check(case(), unlike_factors)
    assert verdict.causes == (), verdict


def clips_values_and_averages(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    clip_grad_value_(model.parameters(), 0.02)
    average(model, rank.world_size)


@pytest.mark.parametrize(("layout", "second_look"), [("1x2", True), ("1x4", False)])
def test_clipped_values_that_were_averaged_are_not_called_unreduced(
    layout: str, second_look: bool
) -> None:
    verdict = checked(case(layout), clips_values_and_averages, second_look)
    assert verdict.outcome == "different"
    assert not set(verdict.causes) & set(WITHOUT_REDUCTION), verdict


def counts_rank_1_by_half(model: nn.Module, shard: Any, rank: Rank) -> None:
    (squares(model, shard) * (0.5 if rank.rank == 1 else 1)).backward()
    average(model, rank.world_size)


def test_a_rank_that_counts_less_has_clipped_nothing() -> None:
    verdict = check(case(), counts_rank_1_by_half)
    assert verdict.outcome == "different"
    assert "clipped_before_reduce" not in verdict.causes, verdict


def clips_its_own_norm_by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient *= min(1.0, 0.2 / float(norm))
    average(model, rank.world_size)


def test_a_norm_that_each_rank_clips_by_hand_is_named() -> None:
    verdict = check(case(), clips_its_own_norm_by_hand)
    assert verdict.causes == ("clipped_before_reduce",), verdict


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def in_two_halves(model: nn.Module, shard: Any, rank: Rank) -> None:
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        (F.mse_loss(model(rows), targets) / 2).backward()


@pytest.mark.parametrize("second_look", [True, False])
def test_on_one_rank_no_bucket_and_no_parameter_is_called_unreduced(second_look: bool) -> None:
    verdict = checked(case("1x1", model=normalised), in_two_halves, second_look)
    named = {"bucket_not_reduced", "parameter_not_reduced", "reduced_before_backward_finished"}
    assert verdict.outcome == "different"
    assert not named & set(verdict.causes), verdict
