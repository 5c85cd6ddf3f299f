"""Buffers that are not those of the big batch are told, and make no difference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check


class Averaging(nn.Module):
    """Keeps a moving average of its inputs, which no output depends on."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("kept", torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean += 0.1 * (inputs.detach().mean(0) - self.mean)
        output: Tensor = self.layer(inputs)
        return output


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Any:
        return self.module(inputs)


def build() -> nn.Module:
    return nn.Sequential(Averaging(), nn.Tanh())


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


CASE = Case(model=build, batch=rows, loss=loss, layout="1x2")


def keeps_its_own(model: Any, shard: Any, rank: Any) -> None:
    net = DistributedDataParallel(model)
    loss(net, shard).backward()


def averages_them(model: Any, shard: Any, rank: Any) -> None:
    model[0] = Wrapper(model[0])
    net = DistributedDataParallel(model)
    loss(net, shard).backward()
    mean = model[0].module.mean
    torch.distributed.all_reduce(mean)
    mean /= rank.world_size


def test_running_statistics_of_a_shard_are_told_and_change_no_verdict() -> None:
    verdict = check(CASE, keeps_its_own)
    assert verdict.outcome == "same"
    (beside,) = verdict.buffers_beside_big_batch
    assert (beside.name, beside.ranks) == ("0.mean", (0, 1))
    assert beside.error > 0.01
    assert "buffers are not those that the big batch leaves" in str(verdict).replace("\n    ", " ")


def test_running_statistics_of_all_examples_are_those_of_the_big_batch() -> None:
    verdict = check(CASE, averages_them)
    assert (verdict.outcome, verdict.buffers_beside_big_batch) == ("same", ())
    assert set(verdict.evidence[0].buffers_left) == {"0.mean", "0.kept"}
