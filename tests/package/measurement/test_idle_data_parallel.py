"""An nn.DataParallel without CUDA devices calls its module itself: nothing of it was shown."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.unknown import UnknownBecause


def build() -> nn.Module:
    return nn.Linear(3, 2)


def build_with_a_wrapper() -> nn.Module:
    with patch.object(torch.cuda, "is_available", return_value=False):
        return nn.Sequential(nn.DataParallel(nn.Linear(3, 2), device_ids=[]))


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def in_data_parallel(model: Any, shard: Any, rank: Any) -> None:
    loss(nn.DataParallel(model, device_ids=[]), shard).backward()


def in_ddp(model: Any, shard: Any, rank: Any) -> None:
    net = DistributedDataParallel(model)
    loss(net, shard).backward()


@pytest.mark.parametrize("layout", ["1x1", "1x2"])
def test_data_parallel_without_devices_is_never_the_same(layout: str) -> None:
    def both(model: Any, shard: Any, rank: Any) -> None:
        net = DistributedDataParallel(nn.DataParallel(model, device_ids=[]))
        loss(net, shard).backward()

    step = in_data_parallel if layout == "1x1" else both
    verdict = check(Case(model=build, batch=rows, loss=loss, layout=layout), step)
    assert verdict.outcome == "unknown"
    assert verdict.unknown_because is UnknownBecause.NOTHING_PARALLEL
    assert "device_ids are empty" in str(verdict)


def test_a_wrapper_that_is_part_of_the_model_says_nothing_of_the_step() -> None:
    case = Case(model=build_with_a_wrapper, batch=rows, loss=loss, layout="1x2")
    assert check(case, in_ddp).outcome == "same"


def test_the_emulation_of_the_suite_is_not_concerned() -> None:
    case = Case(model="mlp", loss="mse_mean", layout="1x2")
    assert check(case, "emulated_data_parallel").outcome == "same"
