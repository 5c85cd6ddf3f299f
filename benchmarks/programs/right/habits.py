"""What right scripts do around a step: return values, wrappers, environment, output, objects."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    ROW,
    Batch,
    ByHand,
    UnderDdp,
    average,
    mean_squared_error,
    regression,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.unknown import UnknownBecause

programs = Programs("habits", right=True)

plain = UnderDdp(mean_squared_error)


@programs.step(unknown=UnknownBecause.RANK_FAILED)
def returns_the_loss(model: nn.Module, shard: Any, rank: Rank) -> Tensor:
    """The step returns its loss, as a training step of most trainers does."""
    ddp = DistributedDataParallel(model)
    value = mean_squared_error(ddp, shard)
    value.backward()
    return value


@programs.step(unknown=UnknownBecause.RANK_FAILED)
def returns_a_number(model: nn.Module, shard: Any, rank: Rank) -> float:
    """The step returns the value of its loss for the log."""
    return returns_the_loss(model, shard, rank).item()


@programs.step(unknown=UnknownBecause.RANK_FAILED)
def returns_metrics(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Any]:
    """The step returns a dict of metrics."""
    value = returns_the_loss(model, shard, rank)
    return {"loss": value.detach(), "rows": torch.tensor(len(shard["rows"]))}


class TwoParts(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(rows)))


@programs.step(model=TwoParts)
def parts_replaced_by_wrappers(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Each part of the model is replaced by its wrapper, so that parameters get longer names."""
    model.body = DistributedDataParallel(model.body)
    model.head = DistributedDataParallel(model.head)
    mean_squared_error(model, shard).backward()


@programs.step(model=TwoParts)
def one_part_replaced_by_its_wrapper(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The head is replaced by its wrapper, and the body is averaged by hand."""
    model.head = DistributedDataParallel(model.head)
    mean_squared_error(model, shard).backward()
    average(model.body, rank)


@programs.step()
def gradients_of_the_wrapper_returned(
    model: nn.Module, shard: Any, rank: Rank
) -> dict[str, Tensor | None]:
    """Gradients are returned under the names of the bare module."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    return {n.removeprefix("module."): p.grad for n, p in ddp.named_parameters()}


@programs.step()
def reads_the_environment(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Ranks and sizes come from the variables that torchrun sets."""
    assert int(os.environ["RANK"]) == dist.get_rank()
    assert 0 <= int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    mean_squared_error(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= int(os.environ["WORLD_SIZE"])


@programs.step()
def joins_a_group_if_there_is_none(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The usual guard around init_process_group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plain(model, shard, rank)


@programs.step()
def writes_much(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step prints, logs and writes to stderr."""
    for line in range(200):
        print(f"rank {rank.rank}: line {line}")
    logging.getLogger("train").warning("a warning")
    sys.stderr.write("progress: 100 %\r")
    plain(model, shard, rank)


@programs.step()
def draws_random_numbers(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Random numbers are drawn for a log, with torch and numpy, and do not enter the loss."""
    torch.rand(3 + rank.rank)
    np.random.rand(2)
    plain(model, shard, rank)


@programs.step(allow_changes=True)
def seeds_itself_as_allowed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step sets torch's seed, which the option allow_changes allows."""
    torch.manual_seed(17)
    plain(model, shard, rank)


@programs.step(unknown=UnknownBecause.PROCESS_CHANGED)
def seeds_itself(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step sets torch's seed, which would change the next test: docs/ranks.md says so."""
    torch.manual_seed(17)
    plain(model, shard, rank)


@programs.step()
def restores_what_it_changes(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Environment, default dtype and grad mode are changed for a while, and then restored."""
    os.environ["MY_SETTING"] = "1"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    with torch.no_grad():
        model(shard["rows"])
    torch.set_default_dtype(default)
    del os.environ["MY_SETTING"]
    plain(model, shard, rank)


@programs.step()
def detects_anomalies(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Backward runs under torch's anomaly detection."""
    with torch.autograd.set_detect_anomaly(True):
        plain(model, shard, rank)


@programs.step()
def profiled(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step runs under torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        plain(model, shard, rank)


@programs.step()
def sums_kept_in_numpy(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients are read as numpy arrays, which share their memory, and are scaled there."""
    mean_squared_error(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.numpy().__itruediv__(rank.world_size)


class Trainer:
    """A trainer whose method is the step."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.history: list[float] = []

    def step(self, model: nn.Module, shard: Any, rank: Rank) -> None:
        """Train once, with the factor taken out again."""
        ddp = DistributedDataParallel(model)
        value = self.factor * mean_squared_error(ddp, shard)
        value.backward()
        self.history.append(value.item())
        for parameter in model.parameters():
            parameter.grad /= self.factor


@programs.loss(step=Trainer(4.0).step)
def method_of_an_object(model: nn.Module, batch: Batch) -> Tensor:
    """The step is a bound method of a trainer that keeps a history."""
    return mean_squared_error(model, batch)


def with_a_factor(model: nn.Module, shard: Any, rank: Rank, *, factor: float) -> None:
    """A step with one argument more."""
    with contextlib.nullcontext():
        Trainer(factor).step(model, shard, rank)


@programs.loss(step=partial(with_a_factor, factor=8.0))
def partial_function(model: nn.Module, batch: Batch) -> Tensor:
    """The step is a functools.partial."""
    return mean_squared_error(model, batch)


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(ROW, OUTPUTS), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(rows)
        return self.layer(rows)


@programs.model(step=ByHand(mean_squared_error))
class CountsItsCalls(Counting):
    """The model has state of its own, which does not enter its outputs."""


NAMES = ["ant", "bee", "cat", "dog"]


def named(generator: torch.Generator) -> dict[str, Any]:
    """Rows, targets, and a list of the classes' names, which is no data of examples."""
    return regression(generator) | {"names": NAMES}


@programs.loss(batch=named)
def names_beside_the_tensors(model: nn.Module, batch: Any) -> Tensor:
    """The batch has a list of strings that is the same for all examples."""
    return mean_squared_error(model, batch) * len(batch["names"])


def named_examples(generator: torch.Generator) -> dict[str, Any]:
    """Rows, targets, and a list with a name for each example."""
    return regression(generator) | {"names": [NAMES[n % 4] for n in range(24)]}


@programs.loss(batch=named_examples, batch_dims={"names": 0})
def a_name_for_each_example(model: nn.Module, batch: Any) -> Tensor:
    """Each example has a name in a list, and the name decides on its weight."""
    weights = [1.0 + NAMES.index(name) for name in batch["names"]]
    each = F.mse_loss(model(batch["rows"]), batch["targets"], reduction="none").mean(1)
    return (each * torch.tensor(weights, dtype=each.dtype)).mean()


@programs.step()
def zeros_where_there_was_none(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients exist as zeros before backward adds to them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ByHand(mean_squared_error)(model, shard, rank)
