"""The steps that ``--verify`` runs on a rank, written as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.commands.explain.emulated_data_parallel import (
    EmulatedDataParallel,
    LossInside,
    LossOf,
)
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.ranks import Rank

PADDING = -100
"""torch's own default for ``ignore_index``."""


def gradient_step(setup: Setup, model: nn.Module, shard: Any, rank: Rank) -> None:
    """Leave the setup's gradient of one optimizer step on the model's parameters."""
    counted = setup.tokens_over != "micro-batch"
    loss = partial(loss_of, reduction="sum" if counted or setup.loss == "sum" else "mean")
    factor = float(setup.loss_times.value(setup.processes))
    divisor = setup.accumulation if setup.accumulation_divided else 1
    tokens = _tokens(setup, shard, setup.tokens_over == "all-ranks") if counted else 1

    def scaled(value: Tensor) -> Tensor:
        return value * factor / divisor / tokens

    _backward_all(setup, model, shard, scaled, loss, inside="mean")


def mended_step(setup: Setup, model: nn.Module, shard: Any, rank: Rank) -> None:
    """Leave the gradient of one optimizer step of a setup that follows the advice.

    A mean over tokens divides by one count of all tokens, and by nothing else. Replicas with uneven
    parts of the batch have one loss over their gathered outputs.
    """
    if setup.loss != "token-mean":
        gradient_step(replace(setup, parallelism="data-parallel"), model, shard, rank)
        return
    tokens = _tokens(setup, shard, True)
    averaged = setup.processes if setup.parallelism in ("ddp", "hybrid") else 1
    loss = partial(loss_of, reduction="sum")
    _backward_all(setup, model, shard, lambda value: value * averaged / tokens, loss, inside="sum")


def _tokens(setup: Setup, shard: Any, of_all_ranks: bool) -> Tensor:
    """The number of tokens in this shard, or in those of all ranks."""
    tokens: Tensor = (shard["targets"] != PADDING).sum()
    if of_all_ranks and setup.processes > 1:
        dist.all_reduce(tokens)
    return tokens


def training(
    setup: Setup,
    mended: bool,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    model: nn.Module,
    shard: Any,
    rank: Rank,
) -> None:
    """Train consecutive steps. The shard holds the examples of all of them.

    ``mended``: whether the setup follows the advice. ``make_optimizer``: takes the parameters.
    """
    one_step = mended_step if mended else gradient_step
    optimizer = make_optimizer(model.parameters())
    for part in _cut(shard, setup.batch * setup.accumulation):
        optimizer.zero_grad()
        one_step(setup, model, part, rank)
        optimizer.step()


def loss_of(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Cross entropy of examples (examples, classes), or of tokens (examples, time, classes)."""
    if outputs.ndim == 3:
        outputs, targets = outputs.flatten(0, 1), targets.flatten()
    return F.cross_entropy(outputs, targets, reduction=reduction, ignore_index=PADDING)


def _backward_all(
    setup: Setup,
    model: nn.Module,
    shard: Any,
    scaled: Callable[[Tensor], Tensor],
    loss: LossOf,
    inside: Literal["mean", "sum"],
) -> None:
    """Run backward for every micro-batch, and reduce the gradients over the ranks.

    ``scaled``: maps the loss of a micro-batch to the value that backward starts from. ``inside``:
    the reduction of the replicas' losses, if each replica has its own.
    """
    wrapped = _wrapped(setup, model, loss)
    window = _cut(shard, setup.batch)
    for number, batch in enumerate(window, start=1):
        with nullcontext() if number == len(window) else _not_reducing(wrapped):
            if setup.parallelism == "data-parallel-loss-inside":
                losses = wrapped(batch["inputs"], batch["targets"])
                value = losses.mean() if inside == "mean" else losses.sum()
            else:
                value = loss(wrapped(batch["inputs"]), batch["targets"])
            scaled(value).backward()
    if setup.parallelism == "all-reduce-sum" and setup.processes > 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


def _wrapped(setup: Setup, model: nn.Module, loss: LossOf) -> nn.Module:
    match setup.parallelism:
        case "ddp":
            return DistributedDataParallel(model)
        case "hybrid":
            return DistributedDataParallel(EmulatedDataParallel(model, setup.replicas))
        case "data-parallel":
            return EmulatedDataParallel(model, setup.replicas)
        case "data-parallel-loss-inside":
            return EmulatedDataParallel(LossInside(model, loss), setup.replicas)
        case _:
            return model


def _not_reducing(wrapped: nn.Module) -> AbstractContextManager[Any]:
    return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def _cut(shard: Any, size: int) -> list[dict[str, Tensor]]:
    pieces = {name: leaf.split(size) for name, leaf in shard.items()}
    return [
        {"inputs": inputs, "targets": targets}
        for inputs, targets in zip(pieces["inputs"], pieces["targets"], strict=True)
    ]
