"""Starting a run, and going on from a checkpoint."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ddp_equivalence import Rank
from ddp_equivalence.ranks.on_ranks import on_ranks
from ddp_equivalence.ranks.server import own_main, start_server
from tests.claims.claim import Evidence, Opposite, claim
from tests.claims.numbered import task
from tests.claims.setting import mse
from tests.claims.trajectory import BATCH, Training, big_batch, differ_by, flat


def join(rank: int, port: int, seconds: float, answer: Connection) -> None:
    """What a training script does first; sends the store's port, and then what it raised, or ""."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch warns of the timeout that is meant
    timeout = timedelta(seconds=seconds)
    store = TCPStore(
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timeout
    )
    answer.send(store.port)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    except Exception as error:
        answer.send(str(error))
    else:
        answer.send("")
    answer.poll(None)  # the other one may still need this one's store


def ends_of(processes: int, seconds: float) -> list[str]:
    """Start so many processes of a world of two: what each says."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    started: list[tuple[BaseProcess, Connection]] = []
    port = 0  # the system gives rank 0 a free one
    with own_main():
        for rank in range(processes):
            mine, theirs = context.Pipe()
            arguments = (rank, port, seconds, theirs)
            process: BaseProcess = context.Process(target=join, args=arguments, daemon=True)
            process.start()
            theirs.close()
            port = mine.recv()
            started.append((process, mine))
    said = [mine.recv() if mine.poll(60) else "nothing within a minute" for _, mine in started]
    for process, mine in started:
        process.kill()  # it has said all that it has to say
        process.join()
        mine.close()
    return said


@claim(
    "false",
    started=1,
    opposite=Opposite("the script is started twice, as ranks 0 and 1", started=2),
)
def test_a_world_of_two_that_is_started_once_waits(evidence: Evidence, started: int) -> None:
    """init_process_group(world_size=2) starts the second process: I call the script once.

    init_process_group starts nothing. world_size is how many processes it waits for, and somebody
    else has to start them all, each with its own rank: torchrun, or torch.multiprocessing.spawn.
    Started once, rank 0 waits for rank 1 until the timeout, and then raises; no step of training
    is made. It looks like a hang, since the timeout is 30 minutes if none is given (10 with NCCL).
    Here it is a second.
    """
    alone = ends_of(started, seconds=1.0 if started == 1 else 30.0)
    both = ends_of(2, seconds=30.0)
    assert len(alone) == 1
    assert "time" in alone[0].lower(), alone
    assert both == ["", ""]
    evidence(processes_started=1, world_size=2, result="rank 0 raises after the timeout")
    evidence(processes_started=2, world_size=2, result="both go on at once")


def continued(rank: Rank, everywhere: bool) -> Tensor:
    """Five steps, a checkpoint, and five more by a new model and optimizer; the weights then."""
    old, rows, targets = task(10 * BATCH)
    before = SGD(old.parameters(), lr=0.05, momentum=0.9)
    five_steps(rank, old, before, rows[:80], targets[:80])
    new = task(10 * BATCH)[0]
    after = SGD(new.parameters(), lr=0.05, momentum=0.9)
    if rank.rank == 0:
        new.load_state_dict(old.state_dict())
    if rank.rank == 0 or everywhere:
        after.load_state_dict(before.state_dict())
    five_steps(rank, new, after, rows[80:], targets[80:])
    return flat(new)


def five_steps(
    rank: Rank, model: nn.Module, optimizer: Optimizer, rows: Tensor, targets: Tensor
) -> None:
    """Under DDP, each rank on its part of every sixteen examples."""
    ddp = DistributedDataParallel(model)
    mine = slice(rank.rank, None, rank.world_size)
    for begin in range(0, len(rows), BATCH):
        batch = slice(begin, begin + BATCH)
        optimizer.zero_grad()
        mse(ddp, rows[batch][mine], targets[batch][mine]).backward()
        optimizer.step()
    del ddp


@claim(
    "false",
    everywhere=True,
    opposite=Opposite("only rank 0 loads the state of the optimizer", everywhere=False),
)
def test_ddp_keeps_ranks_alike_that_go_on_from_a_checkpoint(
    evidence: Evidence, everywhere: bool
) -> None:
    """To go on from a checkpoint rank 0 loads it, and DDP sends everything to the others.

    Weights and buffers, yes: when DDP is made it sends those of rank 0 to all. The optimizer is
    not DDP's: if only rank 0 loads its momentum, the ranks make different steps from the same
    gradient and their weights drift apart, without an error, since DDP never compares weights
    again. Loaded on every rank, the run goes on as the big batch that was never interrupted.
    """
    expected = big_batch(Training(partial(SGD, lr=0.05, momentum=0.9)))
    rows = {
        "every rank": on_ranks("2x2", continued, everywhere),
        "rank 0 only": on_ranks("2x2", continued, False),
    }
    worst = {
        name: max(differ_by(one[None], expected[-1:], expected[0]) for one in found)
        for name, found in rows.items()
    }
    assert worst["every rank"] < 1e-12
    assert worst["rank 0 only"] > 0.01
    assert not torch.equal(rows["rank 0 only"][0], rows["rank 0 only"][1])
    for name, found in rows.items():
        evidence(
            momentum_loaded_on=name,
            differ_by_after_five_more_steps=worst[name],
            ranks_0_and_1_have="the same weights"
            if torch.equal(found[0], found[1])
            else "different weights",
        )
