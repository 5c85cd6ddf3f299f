"""Whether the learning rate has to follow the batch size per process.

These are the same twenty steps of plain SGD. "Summed" is DDP with a communication hook that adds up
the gradients and does not divide.
"""

from __future__ import annotations

import torch

from ddp_equivalence.ranks.on_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.training import big_batch_training, ddp_training, losses, same_steps

LR = 0.01


@claim(
    "false",
    divides=True,
    fails_when=Change("DDP adds up gradients where it should average them", divides=False),
)
def test_half_the_batch_per_process_keeps_the_learning_rate(table: Table, divides: bool) -> None:
    """On 2 processes each has half the batch size, so halve the learning rate from 0.01 to 0.005.

    DDP averages over the processes, so the gradient is that of all 16 examples, whatever the batch
    size per process is. At 0.01 the 2 processes take exactly the steps of the one process; at 0.005
    they train half as fast. The learning rate belongs to the effective batch, which has not
    changed. Halving it is right only if gradients of local means are summed: then 0.005 gives
    exactly the steps of one process at 0.01, and 0.01 gives steps of twice the size.
    """
    expected = big_batch_training(LR)
    table.add_row(
        set_up="1 process, batch size 16",
        gradients="its own",
        learning_rate=LR,
        same_steps_as_1_process="",
        **losses(expected),
    )
    for gradients, lr, same in (
        ("averaged", LR, "yes"),
        ("averaged", LR / 2, "no"),
        ("summed", LR, "no"),
        ("summed", LR / 2, "yes"),
    ):
        weights, other = on_ranks("2x1", ddp_training, lr, 1, divides and gradients == "averaged")
        assert torch.equal(weights, other)
        found = same_steps(weights, expected)
        assert found == same
        table.add_row(
            set_up="2 processes, batch size 8",
            gradients=gradients,
            learning_rate=lr,
            same_steps_as_1_process=found,
            **losses(weights),
        )


@claim(
    "true when the loss of each process is a mean over its own examples, without weight decay",
    divides=False,
    fails_when=Change("DDP averages gradients where it should add them up", divides=True),
)
def test_a_sum_over_processes_needs_the_learning_rate_divided(table: Table, divides: bool) -> None:
    """If gradients are summed over 4 processes, divide the learning rate by 4.

    The sum of 4 local means is 4 times the mean over all, and a quarter of the learning rate undoes
    that. If the loss is already divided by the effective batch (here: the local sum divided by 16),
    the sum is right as it is, and the learning rate stays. With weight decay a quarter of the
    learning rate is wrong, because it also divides the decay: divide the loss or the gradients
    instead. The steps are compared with one process with batch size 16 at 0.01 and the same weight
    decay.
    """
    for loss, scale, lr, decay, same in (
        ("mean over own 4", 1.0, LR, 0.0, "no"),
        ("mean over own 4", 1.0, LR / 4, 0.0, "yes"),
        ("sum over own 4 / 16", 0.25, LR, 0.0, "yes"),
        ("mean over own 4", 1.0, LR / 4, 0.1, "no"),
        ("sum over own 4 / 16", 0.25, LR, 0.1, "yes"),
    ):
        weights, *_ = on_ranks("2x2", ddp_training, lr, 1, divides, scale, decay)
        found = same_steps(weights, big_batch_training(LR, decay))
        assert found == same
        table.add_row(
            loss_of_each_process=loss,
            weight_decay=decay,
            learning_rate=lr,
            same_steps_as_1_process=found,
            **losses(weights),
        )
