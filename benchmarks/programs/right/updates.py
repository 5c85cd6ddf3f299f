"""Right trainers: they move the weights as plain SGD on big batches does."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from benchmarks.programs.common import (
    Batch,
    average,
    deeper_mlp,
    gradients,
    mean_squared_error,
    mlp,
    pieces,
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

programs = Programs("updates", right=True)

one_step, three_steps = partial(programs.step, **ONE_STEP), partial(programs.step, **THREE_STEPS)


@one_step()
def one_step_of_sgd(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP, and one step of torch's SGD."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD(model.parameters(), LR).step()


@three_steps()
def three_steps_of_sgd(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The usual loop over three batches."""
    train(DistributedDataParallel(model), SGD(model.parameters(), LR), joined)


@three_steps(model=deeper_mlp)
def groups_of_parameters(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Weights and biases are two groups of the optimizer, with equal rates."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = SGD([{"params": weights}, {"params": biases, "lr": LR}], LR, foreach=True)
    train(DistributedDataParallel(model), optimizer, joined)


@three_steps()
def weights_decayed_by_nothing(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Momentum and weight decay are zero, and the optimizer is the fused one."""
    optimizer = SGD(model.parameters(), LR, momentum=0.0, weight_decay=0.0, fused=True)
    train(DistributedDataParallel(model), optimizer, joined)


@three_steps()
def maximised_negative_loss(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The optimizer goes uphill on the negative loss."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR, maximize=True)
    for each in batches(joined):
        optimizer.zero_grad()
        (-mean_squared_error(ddp, each)).backward()
        optimizer.step()


@three_steps()
def step_with_a_closure(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The optimizer computes the loss itself, through a closure."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for each in batches(joined):

        def closure(batch: Batch = each) -> Tensor:
            optimizer.zero_grad()
            value = mean_squared_error(ddp, batch)
            value.backward()
            return value

        optimizer.step(closure)


@three_steps()
def rate_from_a_schedule(model: nn.Module, joined: Any, rank: Rank) -> None:
    """A schedule multiplies half of the rate by two."""
    optimizer = SGD(model.parameters(), LR / 2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0)
    ddp = DistributedDataParallel(model)
    for each in batches(joined):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()
        schedule.step()


@three_steps(model=deeper_mlp)
def optimizer_inside_backward(model: nn.Module, joined: Any, rank: Rank) -> None:
    """A hook averages every gradient when it is complete, and moves the parameter at once."""

    def move(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)
        with torch.no_grad():
            parameter -= LR / rank.world_size * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    for each in batches(joined):
        mean_squared_error(model, each).backward()


@three_steps()
def sharded_optimizer(model: nn.Module, joined: Any, rank: Rank) -> None:
    """ZeroRedundancyOptimizer lets each rank move a part of the parameters, and shares them."""
    ddp = DistributedDataParallel(model)
    train(ddp, ZeroRedundancyOptimizer(model.parameters(), SGD, lr=LR), joined)


@three_steps()
def weights_averaged_after_each_step(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Every rank takes its own SGD step, and then the weights are averaged."""
    optimizer = SGD(model.parameters(), LR)
    for each in batches(joined):
        optimizer.zero_grad()
        mean_squared_error(model, each).backward()
        optimizer.step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)


@three_steps()
def post_local_sgd_with_period_one(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Torch's post-local SGD averages the weights after every step."""
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    train(model, PostLocalSGDOptimizer(SGD(model.parameters(), LR), averager), joined)


@three_steps()
def summed_with_a_smaller_rate(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Gradients are summed, and the rate is divided by the world size."""
    optimizer = SGD(model.parameters(), LR / rank.world_size)
    for each in batches(joined):
        optimizer.zero_grad()
        mean_squared_error(model, each).backward()
        for gradient in gradients(model):
            dist.all_reduce(gradient)
        optimizer.step()


@three_steps()
def averaged_in_a_hook_of_the_optimizer(model: nn.Module, joined: Any, rank: Rank) -> None:
    """A hook before the optimizer's step averages the gradients."""
    optimizer = SGD(model.parameters(), LR)
    optimizer.register_step_pre_hook(lambda *arguments: average(model, rank))
    train(model, optimizer, joined)


@three_steps()
def moving_average_beside(model: nn.Module, joined: Any, rank: Rank) -> None:
    """A moving average of the weights is kept beside the model, and not returned."""
    ema = AveragedModel(model, avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new)
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for each in batches(joined):
        optimizer.zero_grad()
        mean_squared_error(ddp, each).backward()
        optimizer.step()
        ema.update_parameters(model)


@three_steps()
def saved_and_loaded_in_between(model: nn.Module, joined: Any, rank: Rank) -> None:
    """After every step the state is saved, and loaded into a new model and optimizer."""
    for each in batches(joined):
        fresh = mlp().to(joined["rows"].dtype)
        fresh.load_state_dict(model.state_dict())
        ddp, optimizer = DistributedDataParallel(fresh), SGD(fresh.parameters(), LR)
        mean_squared_error(ddp, each).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(fresh.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file))


@three_steps()
def state_dict_of_a_copy_returned(model: nn.Module, joined: Any, rank: Rank) -> dict[str, Tensor]:
    """A copy is trained, and its state dict is returned."""
    mine = copy.deepcopy(model)
    train(DistributedDataParallel(mine), SGD(mine.parameters(), LR), joined)
    return mine.state_dict()


@three_steps()
def accumulated_in_every_step(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Every step has micro-batches of two, which are reduced with the last one."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    for each in batches(joined):
        optimizer.zero_grad(set_to_none=False)
        *first, last = pieces(each, 2)
        with ddp.no_sync():
            for micro in first:
                (mean_squared_error(ddp, micro) / (len(first) + 1)).backward()
        (mean_squared_error(ddp, last) / (len(first) + 1)).backward()
        optimizer.step()


@three_steps(dtype=torch.float32)
def scaler_around_three_steps(model: nn.Module, joined: Any, rank: Rank) -> None:
    """A GradScaler scales, unscales for a clip that does not bite, steps and grows."""
    ddp, optimizer = DistributedDataParallel(model), SGD(model.parameters(), LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for each in batches(joined):
        optimizer.zero_grad()
        scaler.scale(mean_squared_error(ddp, each)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        scaler.step(optimizer)
        scaler.update()


@three_steps()
def moved_by_hand_without_autograd(model: nn.Module, joined: Any, rank: Rank) -> None:
    """autograd.grad gives the gradients; the weights are moved by hand."""
    parameters = list(model.parameters())
    for each in batches(joined):
        found = torch.autograd.grad(mean_squared_error(model, each), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, found, strict=True):
                dist.all_reduce(gradient)
                parameter.sub_(gradient, alpha=LR / rank.world_size)


@programs.step(steps=STEPS, lr=LR, batch=three_batches)
def gradients_of_three_steps(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step is called three times and leaves its gradients; the check moves the weights."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
