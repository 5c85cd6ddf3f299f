"""Trainers that move the weights differently from plain SGD on big batches."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.programs.common import (
    Batch,
    average,
    deeper_mlp,
    gradients,
    mean_squared_error,
)
from benchmarks.programs.program import Programs
from benchmarks.programs.updating import (
    LR,
    ONE_STEP,
    STEPS,
    THREE_STEPS,
    batches,
    three_batches,
    train,
)
from ddp_equivalence import Rank

programs = Programs("updates", right=False)

one_step, three_steps = partial(programs.step, **ONE_STEP), partial(programs.step, **THREE_STEPS)


@one_step()
def rate_differs_by_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rate grows with the rank, and the weights are averaged afterwards."""
    mean_squared_error(model, shard).backward()
    SGD(model.parameters(), LR * (1 + rank.rank)).step()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)


@one_step()
def rate_scaled_by_world_size(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rate is multiplied by the world size although gradients are averaged."""
    train_once(model, shard, LR * rank.world_size)


def train_once(model: nn.Module, shard: Batch, lr: float) -> None:
    """DDP, and one step of SGD."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD(model.parameters(), lr).step()


@one_step()
def rate_slightly_off(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rate is a ten-thousandth too high."""
    train_once(model, shard, LR * 1.0001)


@one_step()
def small_weight_decay(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The optimizer has a weight decay that the big batch's SGD does not have."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD(model.parameters(), LR, weight_decay=1e-5).step()


@one_step()
def step_before_the_average(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank moves its weights, and then gradients are averaged."""
    mean_squared_error(model, shard).backward()
    SGD(model.parameters(), LR).step()
    average(model, rank)


@one_step()
def head_left_out_of_the_optimizer(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The optimizer got the parameters of the first layer alone."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD(model[0].parameters(), LR).step()


@one_step()
def copy_trained_and_thrown_away(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The optimizer moves a copy; the model itself is moved by its local gradient."""
    mine = copy.deepcopy(model)
    ddp = DistributedDataParallel(mine)
    mean_squared_error(ddp, shard).backward()
    SGD(mine.parameters(), LR).step()
    mean_squared_error(model, shard).backward()
    SGD(model.parameters(), LR).step()


@three_steps()
def gradients_never_set_to_zero(model: nn.Module, joined: Any, rank: Rank) -> None:
    """zero_grad is missing, so that old gradients add up."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for each in batches(joined):
        mean_squared_error(ddp, each).backward()
        optimizer.step()


@three_steps()
def set_to_zero_before_the_step(model: nn.Module, joined: Any, rank: Rank) -> None:
    """zero_grad stands between backward and step in the last round, and nothing moves there."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for number, each in enumerate(batches(joined)):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        if number == STEPS - 1:
            optimizer.zero_grad()
        optimizer.step()


@three_steps()
def one_step_behind(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Each step uses the gradient of the batch before it (a stale gradient)."""
    ddp = DistributedDataParallel(model)
    stale = [torch.zeros_like(p) for p in model.parameters()]
    for each in batches(joined):
        model.zero_grad()
        mean_squared_error(ddp, each).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), stale, strict=True):
                parameter -= LR * old
        stale = [gradient.clone() for gradient in gradients(model)]


@three_steps()
def reduced_in_the_first_step_only(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The second and third step run under a no_sync that was left on."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for number, each in enumerate(batches(joined)):
        ddp.require_backward_grad_sync = number == 0
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()


@three_steps()
def averaged_in_the_last_step_only(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Ranks train apart, and their weights are averaged once at the end (local SGD)."""
    train(model, SGD(model.parameters(), LR), joined)
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)


@three_steps()
def momentum(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The optimizer has momentum, and the big batch's SGD has none."""
    train(DistributedDataParallel(model), SGD(model.parameters(), LR, momentum=0.9), joined)


@three_steps()
def last_batch_never_read(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The loop ends after two of three batches."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for each in batches(joined)[:-1]:
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()


@three_steps()
def first_batch_read_again(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The loader starts anew in every step and yields its first batch each time."""
    first = batches(joined)[0]
    again = {name: torch.cat([leaf] * STEPS) for name, leaf in first.items()}
    train(DistributedDataParallel(model), SGD(model.parameters(), LR), again)


@three_steps()
def all_in_one_step(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The three batches are accumulated into one step of three times the rate."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, joined).backward()
    SGD(model.parameters(), STEPS * LR).step()


@three_steps()
def schedule_left_on(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The rate decays by one per cent from step to step."""
    optimizer = SGD(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    ddp = DistributedDataParallel(model)
    for each in batches(joined):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()
        schedule.step()


@three_steps(model=deeper_mlp)
def moved_before_it_was_reduced(model: nn.Module, joined: Any, rank: Rank) -> None:
    """A hook moves each parameter by its local gradient; weights are never averaged."""

    def move(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= LR * parameter.grad
        dist.all_reduce(parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    for each in batches(joined):
        mean_squared_error(model, each).backward()


@three_steps()
def sharded_optimizer_without_ddp(model: nn.Module, joined: Any, rank: Rank) -> None:
    """ZeroRedundancyOptimizer shares weights, and nobody averages the gradients."""
    train(model, ZeroRedundancyOptimizer(model.parameters(), SGD, lr=LR), joined)


@three_steps()
def average_of_weights_returned(model: nn.Module, joined: Any, rank: Rank) -> dict[str, Tensor]:
    """The moving average of the weights is returned instead of the weights."""
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for each in batches(joined):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            ema[name].lerp_(parameter.detach(), 0.5)
    return ema


@three_steps()
def resumed_from_an_old_checkpoint(model: nn.Module, joined: Any, rank: Rank) -> None:
    """After the second step the weights of the first are loaded again."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    saved: dict[str, Tensor] = {}
    for number, each in enumerate(batches(joined)):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()
        saved = saved or copy.deepcopy(model.state_dict())
        if number == 1:
            model.load_state_dict(saved)


@programs.step(steps=STEPS, lr=LR, batch=three_batches)
def right_in_the_first_of_three_steps(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook is registered again in each step, and divides once more each time."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / rank.world_size)
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
