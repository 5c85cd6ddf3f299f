"""Starting a run, and going on from a checkpoint."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.numbered import task
from tests.claims.setting import mse
from tests.claims.started import NO_RANK, ends_of
from tests.claims.trajectory import BATCH, Training, big_batch, differ_by, flat


@claim(
    "false",
    started=(0,),
    fails_when=Change("the script is started twice, as ranks 0 and 1", started=(0, 1)),
)
def test_init_process_group_starts_no_second_process(
    table: Table, started: tuple[int, ...]
) -> None:
    """init_process_group(world_size=2) starts the second process: I call the script once.

    It starts nothing, and waits for world_size processes: use torchrun. Started once without a rank
    it raises at once; as rank 0 it waits for the timeout, 30 minutes by default (10 with NCCL), and
    then raises.

    init_process_group starts nothing. world_size is the number of processes that it waits for.
    Something else has to start all of them, each with its own rank: torchrun, or
    torch.multiprocessing.spawn. If plain python starts the script once, without a rank, it raises
    at once, because RANK is not set. If it is started once as rank 0, with an address where the
    processes meet (torchrun sets RANK, MASTER_ADDR and MASTER_PORT), it waits for rank 1 until the
    timeout, and then raises; it makes no training step. That looks like a hang, because the default
    timeout is 30 minutes (10 with NCCL). Here it is half a second.
    """
    (without_rank,) = ends_of(NO_RANK, seconds=0.5)
    assert "environment variable RANK expected, but not set" in without_rank
    first, *others = ends_of(*started, seconds=0.5 if len(started) == 1 else 30.0)
    assert "timed out" in first.lower() or "timeout" in first.lower(), [first, *others]
    assert ends_of(0, 1, seconds=30.0) == ["", ""]
    for processes, result in (
        ("one, without a rank", "raises at once: environment variable RANK expected, but not set"),
        ("one, as rank 0", "raises after the timeout"),
        ("two, as ranks 0 and 1", "both go on at once"),
    ):
        table.add_row(processes_started=processes, world_size=2, result=result)


def continued(rank: Rank, everywhere: bool, wrap_first: bool = False) -> Tensor:
    """The weights after five steps, a checkpoint, and five steps of a new model and optimizer.

    Rank 0 loads the weights, before DDP is made or, with ``wrap_first``, after it.
    ``everywhere``: all ranks load the state of the optimizer; otherwise only rank 0 does.
    """
    old, rows, targets = task(10 * BATCH)
    before = SGD(old.parameters(), lr=0.05, momentum=0.9)
    five_steps(rank, DistributedDataParallel(old), before, rows[:80], targets[:80])
    new = task(10 * BATCH)[0]
    after = SGD(new.parameters(), lr=0.05, momentum=0.9)
    if wrap_first:
        ddp = DistributedDataParallel(new)
    if rank.rank == 0:
        new.load_state_dict(old.state_dict())
    if not wrap_first:
        ddp = DistributedDataParallel(new)
    if rank.rank == 0 or everywhere:
        after.load_state_dict(before.state_dict())
    five_steps(rank, ddp, after, rows[80:], targets[80:])
    return flat(new)


def five_steps(
    rank: Rank, ddp: nn.Module, optimizer: Optimizer, rows: Tensor, targets: Tensor
) -> None:
    """Train each rank on its part of every sixteen examples."""
    mine = slice(rank.rank, None, rank.world_size)
    for begin in range(0, len(rows), BATCH):
        batch = slice(begin, begin + BATCH)
        optimizer.zero_grad()
        mse(ddp, rows[batch][mine], targets[batch][mine]).backward()
        optimizer.step()


@claim(
    "false",
    everywhere=True,
    fails_when=Change("only rank 0 loads the state of the optimizer", everywhere=False),
)
def test_ddp_keeps_ranks_alike_that_go_on_from_a_checkpoint(table: Table, everywhere: bool) -> None:
    """To go on from a checkpoint rank 0 loads it, and DDP sends everything to the others.

    DDP sends the weights of rank 0 once, when it is made, its buffers before a forward (not after
    one under no_sync or no_grad), and the optimizer's state never. Load weights before you wrap the
    model, or on every rank, and the state on every rank. Otherwise the ranks' weights differ,
    without an error.

    It sends the weights and buffers: when DDP is made, it sends those of rank 0 to all ranks. No
    step sends the weights again, so load them before you wrap the model. Weights that rank 0 loads
    afterwards stay on rank 0. DDP does not send the optimizer's state: if only rank 0 loads its
    momentum, the ranks make different steps from the same gradient. In both cases the ranks'
    weights differ without an error, because DDP never compares weights again. If the weights are
    loaded before wrapping, and the momentum on every rank, the run continues like the big batch
    without interruption.
    """
    expected = big_batch(Training(partial(SGD, lr=0.05, momentum=0.9)))
    for weights, momentum, found, right in (
        ("before", "every rank", on_ranks("2x2", continued, everywhere), True),
        ("before", "rank 0 only", on_ranks("2x2", continued, False), False),
        ("after", "every rank", on_ranks("2x2", continued, True, True), False),
    ):
        worst = max(differ_by(one[None], expected[-1:], expected[0]) for one in found)
        alike = torch.equal(found[0], found[1])
        assert (worst < 1e-12, worst > 0.01) == (right, not right)
        assert alike == right
        table.add_row(
            rank_0_loads_weights=f"{weights} DDP is made",
            momentum_loaded_on=momentum,
            differ_by_after_five_more_steps=worst,
            ranks_0_and_1_have="the same weights" if alike else "different weights",
        )
