"""The rounding of the big batch is measured on a rank, as it is in the judging process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import Rank, check
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.rounding import Rounding, measure_more, measure_rounding
from ddp_equivalence.measurement import measure as measuring
from ddp_equivalence.measurement.measure import at_work, rounding_on_device
from ddp_equivalence.measurement.request import Request, read_request
from ddp_equivalence.reference import big_batch
from tests.package.own_cases import own_case, right_step


def measured_on_a_rank(request: Request) -> Rounding | None:
    with at_work(request, 60.0, fresh=False) as ranks:
        for _ in ranks.collect(60.0):
            pass
        return rounding_on_device(ranks, request, None, 60.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rank_measures_what_the_judging_process_measures(dtype: torch.dtype) -> None:
    case = own_case(dtype=dtype)
    found = measured_on_a_rank(read_request(case, right_step, {}))
    reference, batches = big_batch(case), build_batches(case)
    expected = measure_more(reference, measure_rounding(reference, batches), batches)
    assert found is not None
    for key, noise in expected.noise.items():
        # The number of threads may change the last bits of the big batch.
        assert found.noise[key].norm == pytest.approx(noise.norm, rel=0.5)


def test_a_loss_that_raises_on_the_device_leaves_the_limits_of_the_cpu() -> None:
    request = read_request(own_case(), right_step, {})
    broken = replace(request, case=own_case(loss=raises_on_a_rank))
    assert measured_on_a_rank(broken) is None


def raises_on_a_rank(model: nn.Module, batch: Any) -> Tensor:
    raise ValueError("Expected all tensors to be on the same device")


def slightly_off(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 1 + 1e-9


def test_the_larger_rounding_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device of the ranks rounded to 1e-9."""

    def may_be(comparison: Comparison, request: Request) -> bool:
        return not comparison.same

    def rounding(ranks: object, request: Request, *more: object) -> Rounding:
        reference = big_batch(request.case)
        noise = measure_rounding(reference).noise
        coarse = {key: replace(one, norm=1e-9, element=1e-8) for key, one in noise.items()}
        return Rounding(coarse, order_matters=False)

    assert check(own_case(), slightly_off).outcome == "different"
    monkeypatch.setattr(measuring, "may_be_that_of_a_device", may_be)
    monkeypatch.setattr(measuring, "rounding_on_device", rounding)
    verdict = check(own_case(), slightly_off)
    assert verdict.outcome == "same", str(verdict)
    assert "8 x the error of one device (cpu)" in str(verdict)
