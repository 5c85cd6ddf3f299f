"""A loss that somebody multiplies by a number is not called a sum over examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from tests.diagnosis.names.small_case import Step, average, case
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check

SCALE = 8


def sixteen(generator: torch.Generator) -> dict[str, Tensor]:
    """Each of two ranks has eight, and there are 48 numbers among the targets."""
    rows = torch.randn(16, 5, generator=generator)
    return {"rows": rows, "targets": torch.randn(16, 3, generator=generator)}


def times_eight(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    value = squares(ddp, shard)
    (value * 8).backward()  # fault


def times_a_constant(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    value = squares(ddp, shard)
    value = SCALE * value  # fault
    value.backward()


def over_an_eighth(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    value = squares(ddp, shard)
    value = value / 0.125  # fault
    value.backward()


class Trainer:
    weight = 24.0

    def loss(self, model: nn.Module, shard: Any) -> Any:
        return self.weight * squares(model, shard)  # fault


def times_an_attribute(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    Trainer().loss(ddp, shard).backward()


def times_an_argument(model: nn.Module, shard: Any, rank: Rank, weight: float = 8.0) -> None:
    value = squares(model, shard)
    value = value * weight  # fault
    value.backward()
    average(model, rank.world_size)


@pytest.mark.parametrize(
    ("step", "times"),
    [
        (times_eight, "8"),
        (times_a_constant, "8"),
        (over_an_eighth, "8"),
        (times_an_attribute, "24"),
        (times_an_argument, "8"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_factor_of_the_step_is_named_before_a_cause_in_the_loss(step: Step, times: str) -> None:
    verdict = check(case(batch=sixteen), step)
    assert verdict.outcome == "different"
    assert "local_loss_summed" not in verdict.causes
    assert times in str(verdict)
    assert "# fault" in str(verdict), str(verdict)


class Normalised(nn.Module):
    """Its step computes what goes into the layers itself, so that rows are not recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, rows: Tensor) -> Any:
        return self.layers((rows - 1) * 2)


def of_normalised(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def adds_up_passes_and_ranks(model: Any, shard: Any, rank: Rank) -> None:
    for start in (0, 4):
        rows = (shard["rows"][start : start + 4] - 1) * 2
        F.mse_loss(model.layers(rows), shard["targets"][start : start + 4]).backward()
    average(model, 1)


def test_two_sums_are_not_taken_for_one_over_examples() -> None:
    of_sixteen = Case(model=Normalised, batch=sixteen, loss=of_normalised, layout="1x2")
    verdict = check(of_sixteen, adds_up_passes_and_ranks)
    assert set(verdict.causes) == {"sum_not_mean", "accumulation_not_divided"}, verdict
