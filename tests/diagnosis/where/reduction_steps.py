"""Steps whose ranks compute the right gradients, and then reduce them wrongly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.where.faulty import average, loss


def maximum_instead_of_sum(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)  # fault


def unflattened_in_another_order(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    dist.all_reduce(flat)
    flat /= rank.world_size
    at = 0
    for parameter in [*list(model.parameters())[1:], model.first.weight]:  # fault
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()


def hook_halves_biases_under_ddp(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.register_hook(lambda gradient: gradient / 2)  # fault
    loss(ddp, shard).backward()


def rank_returns_early(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad /= rank.world_size
    group = dist.new_group([0, 1, 2])
    if rank.rank == 3:
        return  # fault
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)


def decay_added_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    if rank.rank == 1:
        for parameter in model.parameters():
            parameter.grad += 0.1 * parameter.detach().abs()  # fault
    average(model)


def only_weights_are_divided(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        if name.endswith("weight"):
            parameter.grad /= rank.world_size  # fault


def biases_in_no_reduction(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # fault
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size


def copy_not_written_back(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    average(model.first)
    average(model.norm)
    rest = [*model.middle.parameters(), *model.head.parameters()]
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in rest])
    dist.all_reduce(flat)  # fault
    flat /= rank.world_size


def reduced_to_one_rank(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad /= rank.world_size
        dist.reduce(parameter.grad, 0)  # fault


def wrong_modulo_of_no_sync(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(4):
        part = {name: value[number : number + 1] for name, value in shard.items()}
        if number % 3 == 2:  # fault
            (loss(ddp, part) / 4).backward()
        else:
            with ddp.no_sync():
                (loss(ddp, part) / 4).backward()


def communication_hook_sums_halves(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        flat = bucket.buffer() / rank.world_size
        flat[: len(flat) // 2] *= 0.5  # fault
        work = dist.all_reduce(flat, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    loss(ddp, shard).backward()


def clamped_after_reducing(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.01, 0.02)  # fault


def weights_of_ranks(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad *= (rank.rank + 1) / 10  # fault
        dist.all_reduce(parameter.grad)


def transposed_on_the_way(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    average(model)
    model.middle.weight.grad = model.middle.weight.grad.T.contiguous()  # fault


def cleared_between_micro_batches(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        model.zero_grad()  # fault
        (loss(model, part) / 2).backward()
    average(model)


def tail_hook_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    if rank.rank == 2:
        model.head.weight.register_hook(lambda gradient: 3 * gradient)  # fault
    loss(model, shard).backward()
    average(model)


def tail_not_reduced(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    aligned = len(flat) // 13 * 13  # fault
    dist.all_reduce(flat[:aligned])
    flat[:aligned] /= rank.world_size
    _give_back(model, flat)


def tail_stays_zero(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    aligned = len(flat) // 13 * 13  # fault
    total, begin = torch.zeros_like(flat), flat[:aligned].clone()
    dist.all_reduce(begin)
    total[:aligned] = begin / rank.world_size
    _give_back(model, total)


def _give_back(model: Any, flat: Any) -> None:
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
