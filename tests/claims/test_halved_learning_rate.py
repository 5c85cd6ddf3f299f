"""Whether the learning rate has to follow the batch size per process.

These are the same twenty steps of plain SGD. "Summed" is DDP with a communication hook that adds up
the gradients and does not divide.
"""

from __future__ import annotations

from functools import partial

import torch

from ddp_equivalence.ranks.warm_ranks import on_ranks
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

    The gradient is that of all 16 examples, 8 on each. At 0.01 the two take exactly the steps of
    one process. Halve it only where gradients of means are summed (see the next section).

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
    "true when each loss is a mean over equally many examples, and the optimizer is plain SGD "
    "without weight decay and clipping",
    divides=False,
    fails_when=Change("DDP averages gradients where it should add them up", divides=True),
)
def test_a_sum_over_processes_needs_the_learning_rate_divided(table: Table, divides: bool) -> None:
    """If gradients are summed over 4 processes, divide the learning rate by 4.

    The sum of 4 local means is 4 times the mean over all, and a quarter of the rate undoes that.
    Multiply weight_decay and clipping's max_norm by 4, too. Adam cancels the factor by itself: with
    a quarter of the rate it goes 0.29 of the way in the test. Dividing the loss by 4 is right for
    all of them.

    If the loss is already divided by the effective batch (here: the local sum divided by 16), the
    sum is right as it is. The steps are compared with one process with batch size 16 at 0.01 (Adam:
    0.05) and the settings of the second column, times 4 where it says so. They are the same up to
    1e-5, because clip_grad_norm_ adds 1e-6 to the norm. The way is the distance from the first to
    the last weights, relative to that of the one process.
    """
    sgd, adam = partial(torch.optim.SGD), partial(torch.optim.Adam)
    decay, clipped = {"weight_decay": 0.1}, {"max_norm": 0.5}
    nothing: dict[str, float] = {}
    for loss, name, optimizer, by, more, times_4, same in (
        ("mean over own 4", "SGD", sgd, 1, nothing, False, "no"),
        ("mean over own 4", "SGD", sgd, 4, nothing, False, "yes"),
        ("sum over own 4 / 16", "SGD", sgd, 1, nothing, False, "yes"),
        ("mean over own 4", "SGD, weight decay", sgd, 4, decay, False, "no"),
        ("mean over own 4", "SGD, weight decay x 4", sgd, 4, decay, True, "yes"),
        ("mean over own 4", "SGD, clipping", sgd, 4, clipped, False, "no"),
        ("mean over own 4", "SGD, clipping, max_norm x 4", sgd, 4, clipped, True, "yes"),
        ("mean over own 4", "Adam", adam, 4, nothing, False, "no"),
        ("sum over own 4 / 16", "Adam", adam, 1, nothing, False, "yes"),
    ):
        lr = 0.05 if optimizer is adam else LR
        of_one = {"weight_decay": 0.0, "max_norm": 0.0, **more}
        mine = {key: value * 4 if times_4 else value for key, value in of_one.items()}
        scale = 1.0 if loss == "mean over own 4" else 0.25
        weights, *_ = on_ranks(
            *("2x2", ddp_training, lr / by, 1, divides, scale),
            *(mine["weight_decay"], optimizer, mine["max_norm"]),
        )
        expected = big_batch_training(lr, of_one["weight_decay"], optimizer, of_one["max_norm"])
        way = float((expected[-1] - expected[0]).norm())
        apart = float((weights - expected).norm(dim=1).max()) / way
        assert (apart < 1e-5, apart > 0.01) == (same == "yes", same == "no"), name
        table.add_row(
            loss_of_each_process=loss,
            optimizer=name,
            learning_rate=f"{lr:g} / {by}",
            same_steps_as_1_process=same,
            way=f"{float((weights[-1] - weights[0]).norm()) / way:.3g}",
        )


@claim(
    "false",
    divides=True,
    fails_when=Change("DDP adds up gradients where it should average them", divides=False),
)
def test_a_quarter_of_the_rate_on_four_processes_is_too_small(table: Table, divides: bool) -> None:
    """0.01 was for one GPU, so four processes that average take 0.0025, to add up to the same.

    Averaging has divided already. With the same effective batch 0.01 takes exactly the steps of one
    process, and 0.0025 steps a quarter as long. It is right only where gradients of means are
    summed (see the section before).
    """
    expected = big_batch_training(LR)
    for lr, same in ((LR, "yes"), (LR / 4, "no")):
        weights, *_ = on_ranks("2x2", ddp_training, lr, 1, divides)
        found = same_steps(weights, expected)
        assert found == same
        first = float((weights[1] - weights[0]).norm() / (expected[1] - expected[0]).norm())
        table.add_row(
            set_up="4 processes, batch size 4, averaged",
            learning_rate=lr,
            same_steps_as_1_process=found,
            length_of_the_first_step=f"{first:.4g} times that of 1 process",
        )
