"""Steps per epoch."""

from __future__ import annotations

from math import ceil

from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.numbered import Reading, all_of, read

LAYOUTS = {1: "1x1", 2: "1x2", 4: "2x2"}


@claim(
    "false",
    sampler=True,
    fails_when=Change(
        "there is no sampler, so that every process reads all examples", sampler=False
    ),
)
def test_a_thousand_examples_by_32_on_two_processes_are_16_steps(
    table: Table, sampler: bool
) -> None:
    """1,000 examples, batch size 32, 2 epochs: 64 steps, with two processes just as with one.

    With DistributedSampler each of two processes reads 500 examples in 16 batches: 16 steps an
    epoch and 32 in all, for a step is one of all processes together. A schedule that counts steps
    has to change.

    With DistributedSampler each of the two processes reads half of the examples, 500, in
    ceil(500 / 32) = 16 batches. That is 16 steps per epoch and 32 in all, half as many as with one
    process, because the effective batch is 64 now. A step is one step of all processes together, so
    their steps are not added up. Adjust a learning rate schedule that counts steps.
    """
    for world_size, steps in ((1, 32), (2, 16), (4, 8)):
        how = Reading(1000, 32, epochs=2, sampler=sampler)
        by_rank = on_ranks(LAYOUTS[world_size], read, how)
        assert all([len(epoch) for epoch in epochs] == [steps, steps] for epochs in by_rank)
        table.add_row(
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
"""For each reading by four processes: how many examples are read twice, and how many never."""


def formula(how: Reading, world_size: int) -> int:
    """The steps per epoch of each process."""
    share = how.examples / world_size
    mine = int(share) if how.sampler_drops else ceil(share)
    return int(mine / how.batch_size) if how.loader_drops else ceil(mine / how.batch_size)


@claim(
    "false",
    world_size=4,
    fails_when=Change("the number of processes divides the number of examples", world_size=2),
)
def test_the_two_drop_last_drop_different_things(table: Table, world_size: int) -> None:
    """drop_last=True in the sampler or in the DataLoader: it is the same switch.

    The sampler's leaves out up to W - 1 examples, so that W processes have equally many without
    repeats. The loader's leaves out the last batch of every process if it is not full, up to (B -
    1) x W examples.

    With N examples, W processes and batch size B per process: The sampler's drop_last makes the
    processes equal. If it is off, the sampler reads examples from the beginning of its order a
    second time, until all processes have n = ceil(N / W). If it is on, the sampler leaves out the
    last N mod W examples of its order, and n = floor(N / W). The loader's drop_last drops the last
    batch of every process if it is not full, in all up to (B - 1) x W examples; it drops repeated
    examples only if they are in these batches. Every process makes ceil(n / B) steps, or
    floor(n / B) with the loader's drop_last: the same number on all processes. If set_epoch is
    called, other examples are left out in every epoch.
    """
    for how, expected in ROWS.items():
        by_rank = [epochs[0] for epochs in on_ranks(LAYOUTS[world_size], read, how)]
        numbers = all_of(by_rank)
        twice, never = len(numbers) - len(set(numbers)), how.examples - len(set(numbers))
        assert {len(epoch) for epoch in by_rank} == {formula(how, world_size)}
        assert (twice, never) == expected
        table.add_row(
            examples=how.examples,
            processes=world_size,
            batch_size_per_process=how.batch_size,
            sampler="drop_last" if how.sampler_drops else "",
            loader="drop_last" if how.loader_drops else "",
            steps_per_epoch=len(by_rank[0]),
            read_twice=twice,
            never_read=never,
        )
