"""No report says that something was seen which was not, whatever fault was planted.

Every fault is planted in steps as users write them, by hand and under DDP. What a report says of
the calls, the reads and the wrappers is held against what was recorded of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import fault_trials
from ddp_equivalence.report.verdict import Verdict
from tests.combinations import each_once
from tests.diagnosis.names import (
    drawing_models,
    test_data,
    test_numbers,
    test_random_numbers,
    test_reductions,
)
from tests.diagnosis.names.claims import CLAIMS, false_claims
from tests.diagnosis.names.small_case import Step, average, case
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check


def report(verdict: Verdict) -> str:
    """All that is printed, in the short report and in the full one."""
    full = getattr(verdict, "full_report", verdict.__str__)
    return f"{verdict}\n{full()}"


def reduces_each_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, rank.world_size)


def adds_up_each_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    average(model, 1)


def reduces_one_buffer(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / rank.world_size, gradients)


def wraps_with_several_buckets(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    squares(ddp, shard).backward()


def accumulates_under_ddp(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number, (rows, targets) in enumerate(
        zip(shard["rows"].chunk(3), shard["targets"].chunk(3), strict=True)
    ):
        with nullcontext() if number == 2 else ddp.no_sync():
            (F.mse_loss(ddp(rows), targets) / 3).backward()


OWN_STEPS = (
    reduces_each_gradient,
    reduces_one_buffer,
    wraps_with_several_buckets,
    accumulates_under_ddp,
)


ON_LAYOUTS = [(step, layout) for layout in ("1x2", "2x2") for step in OWN_STEPS]


@pytest.mark.parametrize(("fault", "step", "layout"), each_once(sorted(FAULTS), ON_LAYOUTS))
def test_a_report_on_a_planted_fault_says_only_what_was_seen(
    fault: str, step: Step, layout: str
) -> None:
    shown = case(layout, model=with_batch_norm) if "norm" in fault else case(layout)
    with planted(fault):
        verdict = check(shown, step)
        text = report(verdict)
    assert false_claims(verdict, text) == [], text


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.thorough if FAULTS[one].own_step else ())
        for one in FAULTS
    ],
)
def test_a_report_on_a_fault_in_its_own_strategy_says_only_what_was_seen(name: str) -> None:
    """Where the fault is one of the model, the loss or the data, no step of a user's has it."""
    trials = fault_trials([name], ["2x2", "1+3"], every=False)
    trial = next(one.trial for one in trials if one.why_it_cannot_show is None)
    with planted(name):
        verdict = check(trial.case, trial.strategy, **trial.options)
        text = report(verdict)
    assert verdict.outcome == "different"
    assert false_claims(verdict, text) == [], text


CASES_WITH_STEPS: list[tuple[Case, Step]] = [
    (case(shards="own"), test_data.shuffles_apart),
    (case("1x5", shards="own"), test_data.pads),
    (case("2x2"), test_reductions.wraps_in_the_group_of_the_node),
    (case("2x2"), test_reductions.reduces_in_the_group_of_the_node),
    (case(model=drawing_models.Latent), adds_up_each_gradient),
    (case(model=test_random_numbers.Centred), wraps_with_several_buckets),
    (
        case(model=test_numbers.TwoHeads, loss=test_numbers.with_small_head),
        test_numbers.forgets_the_small_head,
    ),
]


@pytest.mark.parametrize(("shown", "step"), CASES_WITH_STEPS)
def test_a_report_on_an_unusual_case_says_only_what_was_seen(shown: Case, step: Step) -> None:
    verdict = check(shown, step)
    text = report(verdict)
    assert verdict.outcome == "different"
    assert false_claims(verdict, text) == [], text


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


FAULTY_STEPS: list[Step] = [
    test_reductions.flat_buffer_is_not_copied_back,
    test_reductions.parameters_are_reduced,
    test_reductions.nothing_is_reduced,
    test_reductions.all_layers_afterwards,
    test_reductions.unlike_factors,
    test_reductions.clips_values_and_averages,
    test_reductions.counts_rank_1_by_half,
    test_reductions.clips_its_own_norm_by_hand,
    test_data.probes_by_hand,
    test_data.puts_its_own_slice_back,
    test_numbers.rounds_on_the_way,
    test_numbers.largest_of_four,
    test_numbers.not_a_number_on_rank_1,
    test_numbers.thirds,
]


@pytest.mark.parametrize(("step", "layout"), each_once(FAULTY_STEPS, ["1x2", "2x2"]))
def test_a_report_on_a_faulty_step_says_only_what_was_seen(step: Step, layout: str) -> None:
    verdict = check(case(layout), step)
    text = report(verdict)
    assert verdict.outcome == "different"
    assert false_claims(verdict, text) == [], text


def test_a_claim_without_its_record_is_found() -> None:
    """Every claim can fail: none of these things happened in a right step that sums."""
    verdict = check(case(), test_reductions.parameters_are_reduced)
    text = "It was FREED before backward, and clip_grad_norm_ was called with max_norm 1"
    assert len(false_claims(verdict, text)) == 2
    assert len({claim.pattern for claim in CLAIMS}) == len(CLAIMS)
