"""Does the learning rate follow the batch size per process.

The same twenty steps of plain SGD. "Summed" is DDP with a communication hook that adds gradients up
and leaves the division out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.ranks.on_ranks import on_ranks
from tests.claims.claim import Evidence, Opposite, claim
from tests.claims.setting import CLOSE
from tests.claims.training import big_batch_training, ddp_training, losses

LR = 0.01


def equal(weights: Tensor, expected: Tensor) -> bool:
    """After every step."""
    return torch.allclose(weights, expected, **CLOSE)


def apart(weights: Tensor, expected: Tensor) -> bool:
    """After every step, and by more than rounding."""
    return bool(((weights - expected)[1:].norm(dim=1) > 1e-3 * expected[1:].norm(dim=1)).all())


@claim(
    "false",
    divides=True,
    opposite=Opposite("what is called averaged is summed, too", divides=False),
)
def test_half_the_batch_per_process_keeps_the_learning_rate(
    evidence: Evidence, divides: bool
) -> None:
    """On 2 processes each has half the batch size, so halve the learning rate from 0.01 to 0.005.

    DDP averages over the processes, so the gradient is that of all 16 examples, whatever
    the batch size per process is. At 0.01 the 2 processes take exactly the steps of the one
    process; at 0.005 they train half as fast. The learning rate belongs to the effective batch, which
    has not changed. Half of it is right only where gradients of local means are summed: there 0.005
    gives exactly those steps, and 0.01 steps of twice the length.
    """
    expected = big_batch_training(LR)
    evidence(
        set_up="1 process, batch size 16",
        gradients="its own",
        lr=LR,
        like_1_process="",
        **losses(expected),
    )
    for gradients, lr, like in (
        ("averaged", LR, equal),
        ("averaged", LR / 2, apart),
        ("summed", LR, apart),
        ("summed", LR / 2, equal),
    ):
        weights, other = on_ranks("2x1", ddp_training, lr, 1, divides and gradients == "averaged")
        assert torch.equal(weights, other)
        assert like(weights, expected)
        evidence(
            set_up="2 processes, batch size 8",
            gradients=gradients,
            lr=lr,
            like_1_process="yes" if like is equal else "no",
            **losses(weights),
        )


@claim(
    "true when the loss of each process is a mean over its own examples, and SGD has no weight decay",
    divides=False,
    opposite=Opposite("DDP averages after all", divides=True),
)
def test_a_sum_over_processes_needs_the_learning_rate_divided(
    evidence: Evidence, divides: bool
) -> None:
    """If gradients are summed over 4 processes, divide the learning rate by 4.

    The sum of 4 local means is 4 times the mean over all, and a quarter of the learning rate undoes
    that. If the loss is already divided by the effective batch (the local sum over 16, here),
    the sum is right as it is, and the learning rate stays. With weight decay the division is no way
    out, since it divides the decay as well: divide the loss or the gradients instead.
    """
    for loss, scale, lr, decay, like in (
        ("mean over own 4", 1.0, LR, 0.0, apart),
        ("mean over own 4", 1.0, LR / 4, 0.0, equal),
        ("sum over own 4 / 16", 0.25, LR, 0.0, equal),
        ("mean over own 4", 1.0, LR / 4, 0.1, apart),
        ("sum over own 4 / 16", 0.25, LR, 0.1, equal),
    ):
        weights, *_ = on_ranks("2x2", ddp_training, lr, 1, divides, scale, decay)
        assert like(weights, big_batch_training(LR, decay))
        evidence(
            loss_of_each_process=loss,
            weight_decay=decay,
            lr=lr,
            like_1_process_at_0_01="yes" if like is equal else "no",
            **losses(weights),
        )
