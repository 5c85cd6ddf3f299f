"""Effective batch size, and the examples that a step sees.

The effective batch size is the number of examples behind one step of the optimizer. Every process
reads numbered examples with torch's DistributedSampler and DataLoader and records their numbers.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.ranks.on_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.numbered import Reading, all_of, gradient_of, read, same, task, together, train
from tests.claims.setting import flat_gradient, mse, times

LAYOUTS = {1: "1x1", 2: "1x2", 4: "2x2"}
"""The layout for each number of processes: nodes x processes on each node."""


@claim(
    "false",
    sampler=True,
    fails_when=Change(
        "there is no sampler, so that all processes read the same examples", sampler=False
    ),
)
def test_the_batch_size_of_a_loader_is_that_of_its_process(table: Table, sampler: bool) -> None:
    """My DataLoader has batch_size=8, so I train with batches of 8, on four processes too.

    Each process has a loader of its own, and batch_size is the batch size per process. With a
    DistributedSampler the processes read different examples, and DistributedDataParallel averages
    their gradients. So one step is a step on 8 x 4 = 32 examples: the effective batch is the batch
    size per process x the number of processes. The gradient is that of one big batch of exactly
    these examples, and an epoch reads every example once. To keep a batch of 8, give each of the
    four processes 2.
    """
    for world_size, layout in LAYOUTS.items():
        steps = on_ranks(layout, train, Reading(64, 8, sampler=sampler))
        by_rank = [[step.numbers for step in one] for one in steps]
        first = together(by_rank, 0)
        expected = gradient_of(first, 64)
        assert len(set(first)) == len(first) == 8 * world_size
        assert all(same(one[0].gradient, expected) for one in steps)
        assert all_of(by_rank) == list(range(64))
        table.add_row(
            processes=world_size,
            batch_size_per_process=8,
            different_examples_in_a_step=len(set(first)),
            gradient=f"{times(steps[0][0].gradient, expected)} of these",
            steps_in_an_epoch_of_64=len(by_rank[0]),
        )


@claim(
    "false",
    per_process={1: 16, 2: 8, 4: 4},
    fails_when=Change(
        "the batch size per process stays the same", per_process={1: 16, 2: 16, 4: 16}
    ),
)
def test_other_numbers_of_processes_see_the_same_batches(
    table: Table, per_process: dict[int, int]
) -> None:
    """With four processes every step sees other examples than with one, so no run compares.

    DistributedSampler shuffles by seed and epoch only, and deals the shuffled examples out in turn.
    With the same seed, and the batch size per process divided by the number of processes, every
    step reads the same examples on 1, 2 and 4 processes, so it has the same gradient. One process
    must use the sampler as well, because a plain shuffle=True gives another order. And the number
    of processes must divide the number of examples.
    """
    steps = {}
    for world_size, layout in LAYOUTS.items():
        ids = [one[0] for one in on_ranks(layout, read, Reading(64, per_process[world_size]))]
        steps[world_size] = [set(together(ids, number)) for number in range(len(ids[0]))]
    plain = [set(step) for step in on_ranks("1x1", read, Reading(64, 16, sampler=False))[0][0]]
    assert steps[1] == steps[2] == steps[4]
    assert len(steps[1]) == 4
    assert plain != steps[1]
    for processes, (world_size, found) in {
        **{str(world_size): (world_size, found) for world_size, found in steps.items()},
        "1, shuffle=True without a sampler": (1, plain),
    }.items():
        table.add_row(
            processes=processes,
            batch_size_per_process=per_process[world_size],
            lowest_numbers_in_step_1=", ".join(map(str, sorted(found[0])[:6])),
            lowest_numbers_in_step_2=", ".join(map(str, sorted(found[1])[:6])),
        )


def accumulated(rank: Rank, divide_by: int, no_sync: bool, window: int = 3) -> Tensor:
    """The gradient of one step over the first ``window`` micro-batches of 2 on every rank."""
    model, rows, targets = task(24)
    ddp = DistributedDataParallel(model)
    micro_batches = torch.arange(24).reshape(3, rank.world_size, 2)[:window, rank.rank]
    for number, mine in enumerate(micro_batches):
        with ddp.no_sync() if no_sync and number < window - 1 else nullcontext():
            (mse(ddp, rows[mine], targets[mine]) / divide_by).backward()
    gradient = flat_gradient(model)
    del ddp
    return gradient


@claim(
    "true when each loss is divided by the number of accumulation steps",
    divide_by=3,
    fails_when=Change("the losses are not divided", divide_by=1),
)
def test_accumulation_multiplies_the_effective_batch(table: Table, divide_by: int) -> None:
    """Accumulating over three batches before a step makes the effective batch three times larger.

    backward() adds to the gradients, so without a division the sum of three means is three times
    the mean: 3 g. If the losses are divided, it is the gradient of the big batch of batch size per
    process x number of processes x accumulation steps. no_sync() does not change the result; it
    only saves two all-reduces. Dividing by three is right for three micro-batches of equal size. If
    only two are left at the end of the epoch and their losses are still divided by three, the
    gradient is too small.
    """
    for by, no_sync, window, factor in (
        (divide_by, False, 3, 1),
        (divide_by, True, 3, 1),
        (1, True, 3, 3),
        (3, True, 2, 2 / 3),
        (2, True, 2, 1),
    ):
        expected = gradient_of(range(8 * window), 24)
        gradients = on_ranks("2x2", accumulated, by, no_sync, window)
        assert all(same(one, expected * factor) for one in gradients)
        table.add_row(
            batch_size_per_process=2,
            processes=4,
            accumulation_steps=window,
            each_loss_divided_by=by,
            no_sync="yes" if no_sync else "no",
            gradient=f"{times(gradients[0], expected)} of {8 * window} examples",
        )
