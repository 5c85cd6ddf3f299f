"""Models that cannot compute in float64 are compared with a big batch in their own precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.report.script import export
from tests.package.own_cases import make_batch
from tests.package.own_trainers import adamw


class OnlyFloat32(nn.Module):
    """Computes in float32 whatever it is given, as a model does with a kernel for float32 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.last(torch.tanh(self.first(rows.float())))
        return hidden


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"].float())


def case_in(dtype: torch.dtype | None, **changes: Any) -> Case:
    fields: dict[str, Any] = {"model": OnlyFloat32, "batch": make_batch, "loss": loss}
    return Case(**(fields | {"layout": "1x2", "dtype": dtype} | changes))


def right(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def drops_an_example(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    count = len(shard["rows"]) - int(rank)
    right(model, {name: leaf[:count] for name, leaf in shard.items()}, rank)


def sums(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)


def under_autocast(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = ddp(shard["rows"])
    F.mse_loss(outputs.float(), shard["targets"].float()).backward()


def trains(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = adamw(list(ddp.parameters()))
    size = len(shard["rows"]) // 2
    for start in (0, size):
        optimizer.zero_grad()
        loss(ddp, {name: leaf[start : start + size] for name, leaf in shard.items()}).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, None], ids=str)
def test_a_right_step_is_the_same_and_the_precision_is_told(dtype: torch.dtype | None) -> None:
    verdict = check(case_in(dtype), right)
    assert verdict.outcome == "same"
    assert verdict.limit is not None
    assert 0 < verdict.limit < 1e-4
    text = " ".join(str(verdict).split())
    assert "The loss cannot be computed in float64 (it raised RuntimeError: mat1 and mat2" in text
    assert "so the big batch was computed in float32 as well" in text


@pytest.mark.parametrize(
    ("step", "cause"), [(drops_an_example, "examples_dropped"), (sums, "sum_not_mean")]
)
def test_faults_are_named(step: Any, cause: str) -> None:
    verdict = check(case_in(torch.float32), step)
    assert verdict.cause == cause
    text = " ".join(str(verdict).split())
    assert "The loss cannot be computed in float64 (it raised RuntimeError: mat1" in text
    assert "--export-repro" not in verdict.full_report()  # it would be refused


def test_several_steps_of_an_optimizer_are_compared() -> None:
    verdict = check(case_in(torch.float32), trains, compare="update", optimizer=adamw, steps=2)
    assert verdict.outcome == "same"


def test_a_step_with_autocast_is_judged_in_its_own_precision_only() -> None:
    verdict = check(case_in(torch.float32), under_autocast)
    assert (verdict.outcome, verdict.again.other_precision) == ("same", None)


def test_in_float64_the_error_says_which_precision_to_choose() -> None:
    with pytest.raises(BadCase, match=r"choose another, as Case\(dtype=torch.float32\)"):
        check(case_in(torch.float64), right)


def bad_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    raise ValueError(f"no such dtype beside {next(model.parameters()).dtype}")


def test_a_loss_that_raises_in_every_precision_is_bad_input() -> None:
    with pytest.raises(BadCase, match=r"no such dtype beside torch\.float32") as raised:
        check(case_in(torch.float32, loss=bad_loss), right)
    assert "choose another" not in str(raised.value)


def test_a_script_would_need_float64_so_none_is_written(tmp_path: Path) -> None:
    with pytest.raises(BadCase, match="in that, it raised RuntimeError"):
        export(case_in(torch.float32), sums, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_can_compute_in_float64_is_compared_in_it() -> None:
    verdict = check(case_in(torch.float32, model=lambda: nn.Linear(5, 3)), right)
    assert verdict.outcome == "same"
    assert "cannot be computed in float64" not in " ".join(str(verdict).split())
