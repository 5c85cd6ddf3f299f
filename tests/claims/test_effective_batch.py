"""Effective batch size, and the examples that a step sees.

The effective batch size is the number of examples behind one step of the optimizer. Every process
reads numbered examples with torch's DistributedSampler and DataLoader and records their numbers.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.ddp import wrapped
from tests.claims.numbered import Reading, all_of, gradient_of, read, same, task, together, train
from tests.claims.setting import flat_gradient, mse, times, weights

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

    Every process has a loader of its own. With DistributedSampler a step is on 8 x 4 = 32 examples.
    For 8 give each process 2. (With Accelerate's split_batches=True it is 8 in all.)

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

    DistributedSampler shuffles by seed and epoch only, and deals the examples out in turn. With the
    batch size divided by the number of processes, every step has the same examples on 1, 2 and 4
    processes, if one process takes the sampler, too, and their number divides the dataset.

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


def accumulated(
    rank: Rank, divide_by: int, no_sync: bool, window: int = 3, averages: bool = True
) -> Tensor:
    """The gradient of one step over the first ``window`` micro-batches of 2 on every rank."""
    model, rows, targets = task(24)
    ddp = wrapped(model, averages)
    micro_batches = torch.arange(24).reshape(3, rank.world_size, 2)[:window, rank.rank]
    for number, mine in enumerate(micro_batches):
        with ddp.no_sync() if no_sync and number < window - 1 else nullcontext():
            (mse(ddp, rows[mine], targets[mine]) / divide_by).backward()
    gradient = flat_gradient(model)
    del ddp
    return gradient


@claim(
    "true when each loss is divided by the number of accumulation steps, and all micro-batches are "
    "equally large",
    divide_by=3,
    fails_when=Change("the losses are not divided", divide_by=1),
)
def test_accumulation_multiplies_the_effective_batch(table: Table, divide_by: int) -> None:
    """Accumulating over three batches before a step makes the effective batch three times larger.

    backward() adds to the gradients: without the division it is 3 g. With it, it is the gradient of
    batch size per process x processes x accumulation steps. If only two micro-batches are left at
    the end of an epoch, divide by two.

    no_sync() makes no difference here; it saves two all-reduces.
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


@claim(
    "true when the reduction is linear, gives all ranks the same and leaves that as it is, as "
    "DDP's average does, and without static_graph",
    averages=False,
    fails_when=Change("DDP averages in the last row, too", averages=True),
)
def test_no_sync_only_saves_all_reduces(table: Table, averages: bool) -> None:
    """no_sync() under accumulation only saves all-reduces; the result is the same without it.

    Without it every backward() reduces what has accumulated, the reduced part included. The average
    of equal parts is that part again. A hook that adds up adds it up once more: on four processes
    the first two of three micro-batches count 16 and 4 times.

    There are three micro-batches on four processes. `g` is the sum of the processes' gradients over
    all micro-batches, or its quarter where DDP averages.
    """
    big = gradient_of(range(24), 24) * 3
    parts = [gradient_of(range(8 * part, 8 * part + 8), 24) for part in range(3)]
    for name, averaging, times_g, no_sync, right in (
        ("average", True, 1, True, True),
        ("average", True, 1, False, True),
        ("sum, by a hook", averages, 4, True, True),
        ("sum, by a hook", averages, 4, False, False),
    ):
        found = on_ranks("2x2", accumulated, 1, no_sync, 3, averaging)[0]
        assert same(found, times_g * big) == right
        table.add_row(
            reduction=name,
            no_sync="yes" if no_sync else "no",
            gradient=times(found, times_g * big),
            weight_of_each_micro_batch=weights(found, [times_g * part for part in parts]),
        )


@claim(
    "false",
    per_process=128,
    fails_when=Change("each process is given a quarter of the batch", per_process=32),
)
def test_batch_128_on_four_processes_is_512(table: Table, per_process: int) -> None:
    """DataLoader(batch_size=128) on 4 processes: that is 32 each.

    It is 128 each, with DistributedSampler 512 in a step: DDP splits no batch. nn.DataParallel
    does, 32 for each of 4 GPUs, and so does Accelerate with split_batches=True. For 128 in all give
    each process 32.
    """
    steps = on_ranks("2x2", read, Reading(1024, per_process))
    seen = together([epochs[0] for epochs in steps], 0)
    assert len(set(seen)) == 512
    table.add_row(how="DDP, 4 processes", batch_size=128, per_GPU=len(steps[0][0][0]), a_step=512)
    parts = [len(part) for part in torch.arange(128).chunk(4)]
    assert parts == [32] * 4
    table.add_row(how="DataParallel, 4 GPUs", batch_size=128, per_GPU=parts[0], a_step=128)
