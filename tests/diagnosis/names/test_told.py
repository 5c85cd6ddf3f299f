"""What a report says of a wrong step, in its name and in words, was seen; nothing else is said."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Rank, check
from tests.diagnosis.names import drawing_models
from tests.diagnosis.names.claims import false_claims
from tests.diagnosis.names.small_case import (
    NOTHING,
    Step,
    Told,
    average,
    case,
    checked,
    report_of,
    sums_up,
    under_ddp,
)
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check

# Reductions: their tensors, their groups, and their wrappers.


def flat_buffer_is_not_copied_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    flat = nn.utils.parameters_to_vector(p.grad for p in model.parameters() if p.grad is not None)
    dist.all_reduce(flat)
    flat /= rank.world_size


def noise_is_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(torch.randn_like(parameter))


def parameters_are_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= rank.world_size


def nothing_is_reduced(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    dist.all_reduce(torch.zeros(3, dtype=torch.int64))  # a count of something


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


def all_layers_afterwards(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The second backward runs after DDP has reduced."""
    ddp = DistributedDataParallel(model)
    F.mse_loss(ddp(shard["rows"]), shard["targets"]).backward()
    (0.1 * model(shard["rows"]).square().mean()).backward()


def with_small_outputs(model: Any, batch: Any) -> Any:
    return squares(model, batch) + 0.1 * model(batch["rows"]).square().mean()


def unlike_factors(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The shares of the ranks are 3 and 1/3 in one layer, and 1/3 and 3 in the other."""
    for place, parameter in enumerate(model.parameters()):
        factors = (3, 1 / 3) if place < 2 else (1 / 3, 3)
        parameter.register_hook(lambda gradient, factors=factors: gradient * factors[rank.rank % 2])
    squares(model, shard).backward()
    average(model, rank.world_size)


def clips_values_and_averages(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    clip_grad_value_(model.parameters(), 0.02)
    average(model, rank.world_size)


def counts_rank_1_by_half(model: nn.Module, shard: Any, rank: Rank) -> None:
    (squares(model, shard) * (0.5 if rank.rank == 1 else 1)).backward()
    average(model, rank.world_size)


def clips_its_own_norm_by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient *= min(1.0, 0.2 / float(norm))
    average(model, rank.world_size)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


def in_two_halves(model: nn.Module, shard: Any, rank: Rank) -> None:
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        (F.mse_loss(model(rows), targets) / 2).backward()


# Factors, rounding and small parameters.


def divides_by(divisor: float) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        squares(model, shard).backward()
        average(model, divisor)

    return step


def rounds_on_the_way(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        rounded = parameter.grad.bfloat16()
        dist.all_reduce(rounded)
        parameter.grad = rounded.to(parameter.dtype) / rank.world_size


def divides_a_buffer_by_eight(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The division is not seen: it is not made on the gradients."""
    squares(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / 8, gradients)


class TwoHeads(nn.Module):
    """The second head has a gradient that is small beside that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.large(rows), self.small(rows)


def with_small_head(model: nn.Module, batch: Any) -> Any:
    large, small = model(batch["rows"])
    return F.mse_loss(large, batch["targets"]) + 1e-6 * small.square().mean()


def forgets_the_small_head(model: nn.Module, shard: Any, rank: Rank) -> None:
    large, small = model(shard["rows"])
    (F.mse_loss(large, shard["targets"]) + 0 * small.sum()).backward()
    average(model, rank.world_size)


def takes_the_largest(model: nn.Module, shard: Any, rank: Rank) -> None:
    F.mse_loss(model(shard["rows"]), shard["targets"][:, :2]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)


def of_two_targets(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"][:, :2])


def not_a_number_on_rank_1(model: nn.Module, shard: Any, rank: Rank) -> None:
    (squares(model, shard) * (float("nan") if rank.rank == 1 else 1)).backward()
    average(model, rank.world_size)


def not_a_number_afterwards(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, rank.world_size)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= float("nan") if rank.rank == 1 else 1


def thirds(model: nn.Module, shard: Any, rank: Rank) -> None:
    (squares(model, shard) * 4 / 3).backward()
    average(model, rank.world_size)


# Examples that are read, and gradients of earlier passes.


def trains_on_a_sampler(model: nn.Module, batch: Any, rank: Rank, **options: Any) -> None:
    data = TensorDataset(batch["rows"], batch["targets"])
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, rank.world_size, rank.rank, **options
    )
    for rows, targets in DataLoader(data, batch_size=len(data), sampler=sampler):
        F.mse_loss(model(rows), targets).backward()
    average(model, rank.world_size)


def shuffles_apart(model: nn.Module, batch: Any, rank: Rank) -> None:
    trains_on_a_sampler(model, batch, rank, seed=rank.rank)


def pads(model: nn.Module, batch: Any, rank: Rank) -> None:
    trains_on_a_sampler(model, batch, rank, shuffle=False)


def probes_by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
    few = {name: leaf[: len(leaf) // 2] for name, leaf in shard.items()}
    squares(model, few).backward()
    squares(model, shard).backward()
    average(model, rank.world_size)


def gathered(own: Tensor, world_size: int, keeps_own: bool = True) -> Tensor:
    """What all ranks hold; only the own part carries a gradient, or nothing does."""
    parts = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own.detach())
    if keeps_own:
        parts[dist.get_rank()] = own
    return torch.cat(parts)


def puts_its_own_slice_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    outputs = gathered(ddp(shard["rows"]), rank.world_size)
    F.mse_loss(outputs, gathered(shard["targets"], rank.world_size)).backward()


def matches(outputs: Tensor, others: Tensor, first: int = 0) -> Tensor:
    """Each of the outputs must be more like its own other one than like all others."""
    return F.cross_entropy(outputs @ others.T, torch.arange(len(outputs)) + first)


def of_pairs(model: nn.Module, batch: Any) -> Tensor:
    return matches(model(batch["rows"]), model(batch["rows"] + 0.5))


def matches_own_rows(keeps_own: bool, with_gradient: bool = False, times: float = 1.0) -> Step:
    """Each rank's own rows are matched with those of all ranks."""

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        rows = shard["rows"]
        outputs, others = ddp(torch.cat([rows, rows + 0.5])).chunk(2)
        if with_gradient:
            everybody = torch.cat(list(all_gather(others)))
        else:
            everybody = gathered(others, rank.world_size, keeps_own)
        (times * matches(outputs, everybody, first=len(rows) * int(rank))).backward()

    return step


def spoil(model: nn.Module) -> None:
    """Change the gradients in a way that no cause predicts."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.02)


def adds_up_halves(model: nn.Module, shard: Any, rank: Rank) -> None:
    dist.new_group([0, 1])
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        F.mse_loss(model(rows), targets).backward()
    average(model, rank.world_size)


UNREDUCED = (
    "no_all_reduce",
    "no_sync_left_on",
    "raw_module_called",
    "wrapper_dropped",
    "parameters_reduced_not_gradients",
)
"""The causes that say that no gradient was reduced."""

BY_PARTS = ("bucket_not_reduced", "parameter_not_reduced", "reduced_before_backward_finished")
NOT_SAID = "No gradient was reduced"
NODES = case("2x2")
SMALL_OUTPUTS = case("1x4", loss=with_small_outputs)
HALVES = case("1x1", model=normalised)

STEPS: list[Told] = [
    # As much as the model was reduced, so it is never said that no gradient was.
    *(
        Told(step, not_named=UNREDUCED, not_said=NOT_SAID, watched=watched)
        for step in (flat_buffer_is_not_copied_back, noise_is_reduced)
        for watched in (True, False)
    ),
    Told(
        parameters_are_reduced,
        causes="parameters_reduced_not_gradients",
        says="4 parameters were all-reduced, and no gradient",
    ),
    Told(nothing_is_reduced, causes="no_all_reduce"),  # a count is no gradient
    Told(wraps_in_the_group_of_the_node, NODES, not_named=UNREDUCED, not_said=NOT_SAID),
    Told(shards_in_the_group_of_the_node, NODES, not_named=UNREDUCED, not_said=NOT_SAID),
    Told(reduces_in_the_group_of_the_node, NODES, not_named=UNREDUCED, not_said=NOT_SAID),
    Told(all_layers_afterwards, SMALL_OUTPUTS, not_named=UNREDUCED),
    Told(unlike_factors, causes=NOTHING),  # modules hold other shares of all ranks
    Told(clips_values_and_averages, not_named=UNREDUCED),
    Told(clips_values_and_averages, case("1x4"), not_named=UNREDUCED, watched=False),
    Told(counts_rank_1_by_half, not_named=("clipped_before_reduce",)),
    Told(clips_its_own_norm_by_hand, causes="clipped_before_reduce"),
    # On one rank no bucket and no parameter is called unreduced.
    *(
        Told(in_two_halves, HALVES, not_named=BY_PARTS, watched=watched)
        for watched in (True, False)
    ),
    # A factor in half precision is no rounding.
    *(
        Told(divides_by(3), case("1x4", dtype=dtype), not_named=("low_precision_reduce",))
        for dtype in (torch.float16, torch.bfloat16)
    ),
    Told(rounds_on_the_way, case("1x4"), causes="low_precision_reduce"),
    # The world size of another run is one cause; a number that was not seen is not two.
    *(
        Told(
            divides_by(divisor),
            case(layout, dtype=dtype),
            causes="divided_by_wrong_number",
            says=f"every rank divided its gradients by {divisor}",
        )
        for layout, dtype, divisor in (
            ("1x4", torch.float64, 3),
            ("2x2", torch.float16, 8),
            ("2x2", torch.float64, 8),
        )
    ),
    Told(divides_a_buffer_by_eight, NODES, at_most=1, says="every rank holds 0.50 0.50"),
    Told(
        forgets_the_small_head,
        case(model=TwoHeads, loss=with_small_head),
        causes=NOTHING,
        says="small.bias, small.weight",
        not_said="in this precision",
    ),
    # Gradients that are no numbers are not called the big batch, and no report divides by 3/4.
    *(
        Told(step, not_said="is the big batch(?!'s loss)")
        for step in (not_a_number_on_rank_1, not_a_number_afterwards)
    ),
    Told(thirds, case("1x4"), not_said=r"divided by (?!3\.)"),
    # Examples that were read, and gradients of earlier passes.
    Told(shuffles_apart, case(shards="own"), not_named=("sampler_padding_counted",)),
    Told(pads, case("1x5", shards="own"), causes="sampler_padding_counted"),
    Told(
        probes_by_hand,
        case("1x4"),
        causes="stale_gradient_added",
        says="backward was called 2 times in this step",
    ),
    *(
        Told(
            puts_its_own_slice_back,
            case(layout),
            causes="gather_without_gradient",
            says="begins at the loss of the whole batch on every rank",
        )
        for layout in ("1x2", "1x4")
    ),
    *(
        Told(
            matches_own_rows(keeps_own),
            case(layout, loss=of_pairs),
            causes="gather_without_gradient",
            says="Seen to happen; its part in the difference was not computed.",
        )
        for keeps_own, layout in ((True, "1x2"), (False, "1x4"))
    ),
    Told(adds_up_halves, causes="accumulation_not_divided"),  # it makes a group of its own
    Told(sums_up(squares), case(model=drawing_models.Latent)),
    Told(under_ddp(squares), case(model=drawing_models.Centred)),
]


@pytest.mark.parametrize("told", STEPS, ids=lambda told: told.step.__name__)
def test_a_wrong_step_has_its_name_and_only_what_was_seen_is_said(told: Told) -> None:
    verdict = checked(told.case, told.step, told.watched)
    report = report_of(verdict)
    assert verdict.outcome == "different"
    assert told.causes in (None, " ".join(verdict.causes)), report
    assert not set(told.not_named) & set(verdict.causes), report
    assert len(verdict.causes) <= told.at_most, report
    assert told.says in report
    assert not told.not_said or not re.search(told.not_said, report), report
    assert false_claims(verdict, f"{verdict}\n{report}") == []


def largest(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)


def test_shares_of_as_many_examples_as_elements_are_not_printed() -> None:
    """Twelve elements are a mixture of any twelve gradients."""
    verdict = check(case(model=lambda: nn.Linear(5, 2), loss=of_two_targets), takes_the_largest)
    assert verdict.outcome == "different"
    assert verdict.shares is None or verdict.shares.by_example is None
    assert "unexplained: nothing" not in report_of(verdict)


def test_what_is_no_mixture_has_no_shares_and_no_nearest_multiple() -> None:
    verdict = check(case("1x4"), largest)
    assert verdict.shares is None, verdict
    assert verdict.why_no_shares is not None
    assert "no weights of" in verdict.why_no_shares.reason
    assert "nearest:" not in report_of(verdict)


def test_a_gather_that_passes_the_gradient_on_is_not_named() -> None:
    """Something else is wrong, after the gradients have been computed."""

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        matches_own_rows(True, with_gradient=True)(model, shard, rank)
        spoil(model)

    assert check(case(loss=of_pairs), matches_own_rows(True, with_gradient=True)).outcome == "same"
    assert "gather_without_gradient" not in check(case(loss=of_pairs), step).causes


@pytest.mark.parametrize("is_spoilt", [True, False])
def test_a_count_that_is_summed_in_the_forward_pass_is_no_gather(is_spoilt: bool) -> None:
    """A loss is then not that of the rank's rows alone, and the mean of the losses is right."""

    def by_the_count_of_all(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        errors = (ddp(shard["rows"]) - shard["targets"]).square()
        seen = torch.stack([errors.detach().sum(), torch.tensor(float(errors.numel()))])
        dist.all_reduce(seen)
        (errors.sum() * rank.world_size / seen[1]).backward()
        if is_spoilt:
            spoil(model)

    uneven = case(loss=squares, shards="uneven")
    verdict = check(uneven, by_the_count_of_all)
    assert verdict.outcome == ("different" if is_spoilt else "same")
    assert "gather_without_gradient" not in verdict.causes, verdict
