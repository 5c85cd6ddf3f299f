"""Steps per epoch."""

from __future__ import annotations

from math import ceil

from ddp_equivalence.ranks.on_ranks import on_ranks
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
