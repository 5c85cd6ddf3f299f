"""Weights after several steps, not only gradients: momentum, weight decay, Adam, clipping.

Every training makes ten steps with sixteen new examples each: in one plain process with batches of
16, and under DistributedDataParallel on 2 processes with 8 and on 4 processes with 4, all with the
same learning rate. "Differ by" is the largest distance between the weights and those of the big
batch after any step, relative to the distance that the big batch went. 0 is less than 1e-12, which
is rounding in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.trajectory import Training, big_batch, differ_by, on_a_rank

LAYOUTS = {2: "1x2", 4: "2x2"}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.05),
    "SGD, momentum 0.9": partial(SGD, lr=0.05, momentum=0.9),
    "SGD, Nesterov momentum 0.9": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, momentum 0.9, weight decay 0.1": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adam": partial(Adam, lr=0.05),
    "Adam, weight decay 0.1": partial(Adam, lr=0.05, weight_decay=0.1),
    "AdamW, weight decay 0.1": partial(AdamW, lr=0.05, weight_decay=0.1),
    "RMSprop": partial(RMSprop, lr=0.05),
}


@claim(
    "false",
    own_state=False,
    fails_when=Change("the optimizer of rank 1 begins in another state", own_state=True),
)
def test_optimizers_with_a_state_train_like_the_big_batch(table: Table, own_state: bool) -> None:
    """Only gradients are averaged, so the momentum, or Adam's moments, drift apart on the ranks.

    All ranks have the same weights, the same gradient and the same state, so they take the same
    step: with eight optimizers it is the big batch's after every step. Different states would drift
    apart, as after a checkpoint that only one rank loads, or after Join. Only SGD without momentum
    has none.

    DDP sends the weights of rank 0 to all ranks when it is made. From then on every rank has the
    same weights, the same averaged gradient, and its own optimizer in the same state. So it
    computes the same step, and nothing drifts apart. The gradient is the big batch's, so the step
    is too, whatever the optimizer does with it: for all eight optimizers here the weights are those
    of the big batch after every step, with the same learning rate. Different states would show: in
    the last column the optimizer of rank 1 has made a step of its own before, and nothing brings
    the ranks together again. Only plain SGD, which has no state, is not affected.
    """
    for name, optimizer in OPTIMIZERS.items():
        expected = big_batch(Training(optimizer))
        worst = {}
        for world_size, layout in LAYOUTS.items():
            paths = on_ranks(layout, on_a_rank, Training(optimizer, own_state=own_state))
            worst[world_size] = max(differ_by(path, expected) for path in paths)
            assert worst[world_size] < 1e-12
            assert all(torch.equal(path, paths[0]) for path in paths)
        apart = max(
            differ_by(path, expected)
            for path in on_ranks("1x2", on_a_rank, Training(optimizer, own_state=True))
        )
        assert (apart < 1e-12, apart > 0.01) == (name == "SGD", name != "SGD")
        table.add_row(
            optimizer=name,
            distance_of_the_big_batch=float((expected[-1] - expected[0]).norm()),
            differ_by_on_2_processes=worst[2],
            on_4_processes=worst[4],
            on_2_if_rank_1_has_another_state=apart,
        )


@claim(
    "true when the clipping comes after the reduction",
    clip="after",
    fails_when=Change("every process clips its own gradient first", clip="before"),
)
def test_clipping_is_that_of_the_big_batch(table: Table, clip: str) -> None:
    """clip_grad_norm_ works with DDP as it does with one process.

    After DDP's backward() every process clips the same averaged gradient, as the big batch does.
    Clipped by hand before it, each process shrinks its own gradient by its own norm. The average
    then usually has another direction, and where the big batch's norm exceeds the limit it is never
    longer.

    The smaller the batch per process, the larger its norm on average, and the error.
    """
    for max_norm in (1.0, 1000.0):
        optimizer = partial(SGD, lr=0.05, momentum=0.9)
        right = Training(optimizer, max_norm=max_norm, clip=clip)
        wrong = Training(optimizer, max_norm=max_norm, clip="before")
        expected = big_batch(right)
        for world_size, layout in LAYOUTS.items():
            after = differ_by(on_ranks(layout, on_a_rank, right)[-1], expected)
            before = differ_by(on_ranks(layout, on_a_rank, wrong)[-1], expected)
            assert after < 1e-12
            assert (before > 0.01) == (max_norm == 1.0)
            table.add_row(
                max_norm=f"{max_norm:g}" + (", never reached" if max_norm > 1 else ""),
                processes=world_size,
                clipped_after_the_reduction_differ_by=after,
                clipped_before_it_differ_by=before,
            )
