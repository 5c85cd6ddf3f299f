"""Steps that do not reduce all that they should, or reduce it too early."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Batch = dict[str, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["x"])
    return nn.functional.mse_loss(outputs, batch["y"])


def average(parameters: Iterable[nn.Parameter], world_size: int) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def reduces_parameters(model: nn.Module, batch: Batch, rank: Any) -> None:
    model.zero_grad()
    loss = loss_of(model, batch)
    dist.all_reduce(loss.detach().clone())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter /= rank.world_size


def reduces_a_copy_of_the_parameters(model: nn.Module, batch: Batch, rank: Any) -> None:
    loss_of(model, batch).backward()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    dist.all_reduce(flat)
    flat /= rank.world_size
    start = 0
    for parameter in parameters:
        values = flat[start : start + parameter.numel()]
        parameter.data.copy_(values.view_as(parameter))
        start += parameter.numel()


def only_matrices(model: nn.Module, batch: Batch, rank: Any) -> None:
    loss_of(model, batch).backward()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    last = matrices.pop()
    dist.all_reduce(last.grad)
    last.grad /= rank.world_size
    for parameter in matrices:
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


class FlatReducer:
    """Reduces the gradients of some parameters in one buffer."""

    def __init__(self, parameters: Iterable[nn.Parameter], world_size: int) -> None:
        self.parameters = list(parameters)
        self.world_size = world_size

    def run(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat /= self.world_size
        for gradient, value in zip(
            gradients, _unflatten_dense_tensors(flat, gradients), strict=True
        ):
            gradient.copy_(value)


def flat_without_the_last_layer(model: nn.Module, batch: Batch, rank: Any) -> None:
    reducer = FlatReducer(list(model.parameters())[:-2], rank.world_size)
    loss = loss_of(model, batch)
    loss.backward()
    reducer.run()


def ddp_ignores_one(model: nn.Module, batch: Batch, rank: Any) -> None:
    names = ["4.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    loss = loss_of(ddp, batch)
    loss.backward()


def skipping_hook(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    if bucket.is_last():
        done: Future[Tensor] = Future()
        done.set_result(buffer)
        return done
    buffer /= dist.get_world_size()
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hook_skips_a_bucket(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004)
    ddp.register_comm_hook(None, skipping_hook)
    for _ in range(3):
        ddp.zero_grad()
        loss = loss_of(ddp, batch)
        loss.backward()


def frozen_on_rank_1(model: nn.Module, batch: Batch, rank: Any) -> None:
    layers = list(model.children())
    for layer in layers[2 * rank.rank :][:1]:
        if rank.rank == 1:
            layer.weight.requires_grad_(False)
    loss_of(model, batch).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average(model.parameters(), rank.world_size)


def frozen_before_ddp(model: nn.Module, batch: Batch, rank: Any) -> None:
    for name, parameter in model.named_parameters():
        trains = name != "4.bias" or rank.rank != 2
        parameter.requires_grad = trains
    loss_of(model, batch).backward()
    model[4].bias.grad = torch.zeros(3, dtype=torch.float64) if rank == 2 else model[4].bias.grad
    average(model.parameters(), rank.world_size)


class Overlapping:
    """Reduces gradients in buckets, as soon as enough of them are ready."""

    def __init__(self, model: nn.Module, world_size: int, size: int) -> None:
        self.world_size, self.size = world_size, size
        self.model = model
        self.ready: list[nn.Parameter] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def on_gradient(self, parameter: nn.Parameter) -> None:
        self.ready.append(parameter)
        if len(self.ready) == self.size:
            self.flush()

    def flush(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size


def flushes_before_all_are_ready(model: nn.Module, batch: Batch, rank: Any) -> None:
    Overlapping(model, rank.world_size, size=4)
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()


def hooks_reduce_the_first_micro_batch(model: nn.Module, batch: Batch, rank: Any) -> None:
    Overlapping(model, rank.world_size, size=6)
    halves = [{name: leaf.chunk(2)[i] for name, leaf in batch.items()} for i in range(2)]
    for half in halves:
        loss = loss_of(model, half) / len(halves)
        loss.backward()
