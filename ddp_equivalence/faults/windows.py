"""Several backward passes of one step are added up, cleared or reduced at the wrong moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn, optim

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.faults.changed_ddp import around_ddp_forward
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.sharded_batch import micro_batches
from ddp_equivalence.strategies.strategy import Task, TrainStep

# Loops over the micro-batches of a window, with one number in them that is wrong.


def loop_over_micro_batches(
    task: Task,
    step: TrainStep,
    record_firing: RecordFiring,
    *,
    divisor: Callable[[int], int] = int,
    early: int = 0,
) -> TrainStep:
    """``divisor``: what each loss is divided by, for so many micro-batches. ``early``: so many
    micro-batches before the last one DDP reduces.
    """
    ddp, dims = task.wrap(), task.case.batch_dims
    full_window = len(task.shards[0].indices[task.rank.rank])

    def broken(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard, dims))), full_window)
        for number, indices in enumerate(window, start=1 + early):
            with nullcontext() if number == len(window) else ddp.no_sync():
                (task.loss(ddp, take(shard, indices, dims)) / divisor(len(window))).backward()
        record_firing()

    return broken


ACCUMULATION_BOUNDARY_OFF_BY_ONE = Fault(
    name="accumulation_boundary_off_by_one",
    sentence="no_sync is off for the second-to-last micro-batch, and on for all others.",
    break_step=partial(loop_over_micro_batches, early=1),
    strategies=("ddp_accumulation",),
    own_step="",
)


ACCUMULATION_NOT_DIVIDED = Fault(
    name="accumulation_not_divided",
    sentence="A loop over micro-batches adds up their mean losses, and does not divide the sum.",
    break_step=partial(loop_over_micro_batches, divisor=lambda count: 1),
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    own_step="",
)


LAST_WINDOW_DIVIDED_BY_FULL = Fault(
    name="last_window_divided_by_full",
    sentence="A window of micro-batches is divided as if it had one more.",
    break_step=partial(loop_over_micro_batches, divisor=lambda count: count + 1),
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    own_step="",
)


# Half of the loss is differentiated after DDP has reduced gradients.


def differentiate_twice(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that calls backward through DDP, and then through the model itself."""
    ddp = task.wrap()

    def broken(shard: Any) -> None:
        (task.loss(ddp, shard) / 2).backward()
        (task.loss(task.model, shard) / 2).backward()
        record_firing()

    return broken


BACKWARD_AFTER_REDUCTION = Fault(
    name="backward_after_reduction",
    sentence="After DDP has reduced gradients, half of the loss is differentiated without it.",
    break_step=differentiate_twice,
    strategies=("ddp_mean",),
    own_step="",
)


# Gradients are cleared before every forward pass, also within an accumulation window.


def clear_before_forward(record_firing: RecordFiring) -> Any:
    """Clear gradients before every forward pass."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        if any(parameter.grad is not None for parameter in ddp.module.parameters()):
            ddp.module.zero_grad(set_to_none=True)
            record_firing()
        return call(*arguments, **named)

    return around_ddp_forward(change)


ONLY_LAST_MICRO_BATCH = Fault(
    name="only_last_micro_batch",
    sentence="zero_grad is called before every micro-batch, not once before the window.",
    break_torch=clear_before_forward,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_accumulation",),
    own_step="accumulating",
    acts_at=("forward",),
)


# All gradients are reduced as soon as the first gradient is ready.


def reduce_too_early(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that reduces gradients inside backward."""
    trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    not_reduced: list[bool] = []

    def reduce_all(parameter: Tensor) -> None:
        if not_reduced:
            not_reduced.clear()
            reduce_gradients(task.model, task.rank.world_size)
            record_firing()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(reduce_all)

    def broken(shard: Any) -> None:
        not_reduced.append(True)
        task.loss(task.model, shard).backward()

    return broken


REDUCED_BEFORE_BACKWARD_FINISHED = Fault(
    name="reduced_before_backward_finished",
    sentence="As soon as the first gradient is ready, a hook reduces all gradients.",
    break_step=reduce_too_early,
    strategies=("manual_all_reduce_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    own_step="",
)


# ``zero_grad`` does nothing, so that old gradients are added to new ones.


@contextmanager
def ignore_zero_grad(record_firing: RecordFiring) -> Iterator[None]:
    """``zero_grad`` of modules and optimizers clears nothing."""

    def of_module(module: nn.Module, *arguments: Any, **named: Any) -> None:
        if any(parameter.grad is not None for parameter in module.parameters()):
            record_firing()

    def of_optimizer(optimizer: optim.Optimizer, *arguments: Any, **named: Any) -> None:
        record_firing()

    with (
        patch.object(nn.Module, "zero_grad", of_module),
        patch.object(optim.Optimizer, "zero_grad", of_optimizer),
    ):
        yield


STALE_GRADIENT_ADDED = Fault(
    name="stale_gradient_added",
    sentence="zero_grad leaves gradients as they are.",
    break_torch=ignore_zero_grad,
    why_it_cannot_show=shows_everywhere,
    steps=2,
    own_step="of_two_batches",
    acts_at=("zero_grad", "backward"),
)
