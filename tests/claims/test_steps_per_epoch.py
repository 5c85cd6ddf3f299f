"""Steps per epoch, and starting as many processes as the world has."""

from __future__ import annotations

import multiprocessing
import tempfile
from datetime import timedelta
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from ddp_equivalence.ranks.on_ranks import on_ranks
from ddp_equivalence.ranks.server import own_main, start_server
from tests.claims.claim import Evidence, Opposite, claim
from tests.claims.numbered import Reading, all_of, read

LAYOUTS = {1: "1x1", 2: "1x2", 4: "2x2"}


@claim(
    "false",
    sampler=True,
    opposite=Opposite("there is no sampler, so that both processes read all", sampler=False),
)
def test_a_thousand_examples_by_32_on_two_processes_are_16_steps(
    evidence: Evidence, sampler: bool
) -> None:
    """1,000 examples, batch size 32, 2 epochs: 64 steps, with two processes just as with one.

    With DistributedSampler each process reads half of the examples, 500, in ceil(500 / 32) = 16
    batches: 16 steps per epoch and 32 in all, half as many as with one process, since the
    effective batch is 64 now. The steps of different processes are the same steps: they are not
    added up. A schedule of the learning rate that counts steps has to know it.
    """
    for world_size, steps in ((1, 32), (2, 16), (4, 8)):
        how = Reading(1000, 32, epochs=2, sampler=sampler)
        by_rank = on_ranks(LAYOUTS[world_size], read, how)
        assert all([len(epoch) for epoch in epochs] == [steps, steps] for epochs in by_rank)
        evidence(
            processes=world_size,
            batch_size_per_process=32,
            effective_batch=32 * world_size,
            steps_per_epoch=steps,
            steps_in_2_epochs=2 * steps,
        )


ROWS = {
    Reading(1002, 32): (2, 0),
    Reading(1002, 32, sampler_drops=True): (0, 2),
    Reading(1002, 32, loader_drops=True): (0, 106),
    Reading(1002, 32, sampler_drops=True, loader_drops=True): (0, 106),
    Reading(1022, 32, loader_drops=True): (2, 0),
    Reading(1026, 32): (2, 0),
    Reading(1026, 32, sampler_drops=True): (0, 2),
}
"""What is read by four processes -> how many examples twice, and how many never."""


def formula(how: Reading, world_size: int) -> int:
    """Steps per epoch of each process."""
    share = how.examples / world_size
    mine = int(share) if how.sampler_drops else ceil(share)
    return int(mine / how.batch_size) if how.loader_drops else ceil(mine / how.batch_size)


@claim(
    "false",
    world_size=4,
    opposite=Opposite("the number of processes divides the number of examples", world_size=2),
)
def test_the_two_drop_last_drop_different_things(evidence: Evidence, world_size: int) -> None:
    """drop_last=True in the sampler or in the DataLoader: it is the same switch.

    The sampler's evens out the processes: without it, examples at the beginning of the order are
    read a second time until all processes have n = ceil(N / W); with it the N mod W last ones of
    the order are left out, and n = floor(N / W). The loader's drops the last batch of every process
    if it is not full, up to (B - 1) x W examples; the repeats go only if they are in it. A process
    makes ceil(n / B) steps, or with the loader's floor(n / B): the same number on all processes.
    What is left out is another part in every epoch, if set_epoch is called. (N examples,
    W processes, batch size B per process.)
    """
    for how, expected in ROWS.items():
        by_rank = [epochs[0] for epochs in on_ranks(LAYOUTS[world_size], read, how)]
        numbers = all_of(by_rank)
        twice, never = len(numbers) - len(set(numbers)), how.examples - len(set(numbers))
        assert {len(epoch) for epoch in by_rank} == {formula(how, world_size)}
        assert (twice, never) == expected
        evidence(
            examples=how.examples,
            processes=world_size,
            batch_size_per_process=how.batch_size,
            sampler="drop_last" if how.sampler_drops else "",
            loader="drop_last" if how.loader_drops else "",
            steps_per_epoch=len(by_rank[0]),
            read_twice=twice,
            never_read=never,
        )


def join(file: str, rank: int, seconds: float, answer: Connection) -> None:
    """What a training script does first; sends what it raised, or ""."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{file}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=seconds),
        )
    except Exception as error:
        answer.send(str(error))
    else:
        answer.send("")


def ends_of(processes: int, seconds: float) -> list[str]:
    """Start so many processes of a world of two: what each says."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder, own_main():
        started = []
        for rank in range(processes):
            mine, theirs = context.Pipe(duplex=False)
            arguments = (str(Path(folder) / "store"), rank, seconds, theirs)
            process = context.Process(target=join, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        said = [mine.recv() for _, mine in started]
        for process, mine in started:
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
