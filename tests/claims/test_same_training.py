"""The same training on one device, on one machine with DataParallel, and on several machines.

The training takes twenty steps of SGD with batches of 16 from 320 examples, read with DataLoader
and DistributedSampler. The weights of every process are compared after every step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.setting import times
from tests.claims.training import (
    big_batch_training,
    data_parallel_training,
    ddp_training,
    losses,
    same_steps,
)

LR = 0.01


def first_gradient(weights: Tensor) -> Tensor:
    """The gradient of the first step, from the weights before and after it."""
    return (weights[0] - weights[1]) / LR


@claim(
    "false",
    divides=True,
    fails_when=Change("DDP adds up the processes' gradients without dividing", divides=False),
)
def test_two_machines_train_as_one_with_data_parallel(table: Table, divides: bool) -> None:
    """DataParallel with batch 16 on 4 GPUs cannot be reproduced on 2 machines with 2 GPUs each.

    Both take the same 16 examples a step, so all weights are the same, at the same learning rate.
    What has to be kept is the effective batch. (Batch norm sees the examples of its own GPU, and
    these are others in each set-up.)

    It can, with the same learning rate of 0.01: as one process per machine with batch size 8, or as
    one process per GPU with batch size 4. The effective batch is 16 each time, and each step has
    the same 16 examples. So the gradients are the same and, step by step, the weights. What has to
    be kept is the effective batch; the learning rate then stays the same. (Batch norm, and any
    other module that looks across examples, sees only the examples of its GPU in all of these
    trainings but the first.) The GPUs inside a process are emulated on the CPU; the processes and
    DDP are real.
    """
    expected = big_batch_training(LR)
    g = first_gradient(expected)
    for set_up, batch, by_process in (
        ("1 process, no wrapper", 16, (expected,)),
        ("1 process, 4 GPUs (DataParallel)", 16, (data_parallel_training(LR, 4),)),
        (
            "2 machines, 1 process each, with 2 GPUs each",
            8,
            on_ranks("2x1", ddp_training, LR, 2, divides),
        ),
        (
            "2 machines, 2 processes each, with 1 GPU each",
            4,
            on_ranks("2x2", ddp_training, LR, 1, divides),
        ),
    ):
        for weights in by_process:
            assert same_steps(weights, expected) == "yes"
        table.add_row(
            set_up=set_up,
            batch_size_per_process=batch,
            learning_rate=LR,
            first_gradient=times(first_gradient(weights), g),
            same_steps_as_1_process=same_steps(weights, expected),
            **losses(weights),
        )


SUSPECTS: dict[str, dict[str, Any]] = {
    "none": {},
    "learning rate x 2, for twice the processes": {"lr": 2 * LR},
    "weight decay x 2": {"weight_decay": 0.2},
    "momentum is not set": {"optimizer": torch.optim.SGD},
}


@claim(
    "false",
    suspects=SUSPECTS,
    fails_when=Change(
        "nothing but DDP differs", suspects=dict.fromkeys(SUSPECTS, SUSPECTS["none"])
    ),
)
def test_equal_gradients_can_train_worse(table: Table, suspects: dict[str, dict[str, Any]]) -> None:
    """The first gradients are equal, and training is still worse: DDP computes something wrong.

    Look at what turns gradients into weights: rate, schedule, settings of the optimizer, its state
    after a checkpoint. Then at what later steps read: set_epoch, dropped or repeated examples,
    buffers, evaluation mode, parameters that were frozen when DDP wrapped the model and are no
    longer (DDP never reduces them), steps that call model.module or stay in no_sync. If nothing but
    DDP differs, every step is the same.

    Both sides have momentum 0.9, weight decay 0.1 and rate 0.01, but for what the first column
    says.
    """
    momentum = partial(torch.optim.SGD, momentum=0.9)
    settings: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "optimizer": momentum}
    expected = big_batch_training(**settings)
    for name, changed in suspects.items():
        mine = settings | changed
        weights = on_ranks(
            "2x2", ddp_training, mine["lr"], 1, True, 1.0, mine["weight_decay"], mine["optimizer"]
        )[0]
        apart = float((weights - expected)[-1].norm() / (expected[-1] - expected[0]).norm())
        first = first_gradient_error(weights, expected, mine, settings)
        assert first < 1e-9
        assert (apart < 1e-12, apart > 0.01) == (name == "none", name != "none")
        table.add_row(
            what_differs=name,
            error_of_the_first_gradient=first,
            weights_after_20_steps_differ_by=apart,
        )


def first_gradient_error(
    weights: Tensor, expected: Tensor, mine: dict[str, Any], settings: dict[str, Any]
) -> float:
    """The relative distance of the gradients behind the first steps, without weight decay."""
    gradient, right = (
        (path[0] - path[1]) / how["lr"] - how["weight_decay"] * path[0]
        for path, how in ((weights, mine), (expected, settings))
    )
    return float((gradient - right).norm() / right.norm())
