"""What an epoch reads: padding, order, and no sampler at all."""

from __future__ import annotations

import torch

from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.numbered import Reading, all_of, apart, gradient_of, read, same, together, train
from tests.claims.setting import times


@claim(
    "true when the number of processes divides the number of examples, the loader drops no last "
    "batch, and all processes give the sampler the same seed and epoch",
    sizes=(18, 102, 1002),
    fails_when=Change(
        "the number of processes divides the number of examples", sizes=(20, 100, 1000)
    ),
)
def test_a_sampler_reads_every_example_once(table: Table, sizes: tuple[int, ...]) -> None:
    """DistributedSampler shares the data out, so every example is seen once per epoch.

    If the processes cannot get equally many, it repeats the first examples of the order in the last
    step; that step is the big batch of what it read, repeats included. The loader's drop_last
    leaves a short last batch out, the sampler's the examples that would need repeats.

    At most one example fewer than there are processes is repeated. The last step is off by the
    weight of the repeats in it, which does not shrink with more data, because the last step stays
    small. The epoch's mean gradient is off by their weight among all examples, which does. With
    set_epoch other examples are repeated in every epoch. In the last rows the loader drops what is
    no full batch.
    """
    for examples in sizes:
        steps = on_ranks("2x2", train, Reading(examples, 4))
        by_rank = [[step.numbers for step in one] for one in steps]
        order = [one for step in zip(*by_rank, strict=True) for one in dealt(step)]
        repeated, last = order[examples:], together(by_rank, -1)
        assert repeated == order[: -examples % 4]
        expected = gradient_of(last, examples)
        assert all(same(one[-1].gradient, expected) for one in steps)
        without = gradient_of([one for one in last if one not in repeated], examples)
        whole = gradient_of(range(examples), examples)
        weights = torch.tensor([len(one.numbers) for one in steps[0]], dtype=torch.double)
        mean = torch.stack([one.gradient for one in steps[0]]).T @ weights / weights.sum()
        assert apart(expected, without) > 0.01
        table.add_row(
            examples=examples,
            processes=4,
            repeated=len(repeated),
            last_step=f"{len(last)} examples, {len(repeated)} of them repeats",
            gradient_of_last_step_off_by=apart(steps[0][-1].gradient, without),
            mean_gradient_of_epoch_off_by=apart(mean, whole),
        )
    for examples in (64, 72):
        read_by = on_ranks("2x2", read, Reading(examples, 4, loader_drops=True))
        numbers = all_of([epochs[0] for epochs in read_by])
        assert len(set(numbers)) == len(numbers) == 64
        table.add_row(
            examples=f"{examples}, the loader drops",
            processes=4,
            repeated=0,
            last_step=f"{examples - len(numbers)} examples are never read",
            gradient_of_last_step_off_by="",
            mean_gradient_of_epoch_off_by="",
        )


def dealt(step: tuple[list[int], ...]) -> list[int]:
    """The examples of one step in the order of the sampler, which deals them out in turn."""
    return [number for turn in zip(*step, strict=True) for number in turn]


@claim(
    "false",
    sampler=False,
    fails_when=Change("there is a DistributedSampler", sampler=True),
)
def test_ddp_does_not_share_out_the_data(table: Table, sampler: bool) -> None:
    """DistributedDataParallel splits the data, so I need no DistributedSampler.

    DDP never sees the dataset. Without a sampler every process reads all of it. With the same seed
    four processes take the same batches, and together the steps of one. With a seed each, a step
    has four batches, and an epoch reads every example four times.

    DDP never sees the dataset; it averages gradients. Without a sampler every process reads all of
    it. If all processes shuffle with the same seed, they compute the same batch. The average of
    four equal gradients is the gradient of one process: four times the work for the same steps. If
    each process has a seed of its own, the effective batch is four times larger, but every example
    is read four times in an epoch, and one step may contain it twice.
    """
    rows = {
        "DistributedSampler": Reading(64, 4),
        "none, the same seed": Reading(64, 4, sampler=sampler),
        "none, a seed each": Reading(64, 4, sampler=sampler, own_seed=True),
    }
    for name, how in rows.items():
        steps = on_ranks("2x2", train, how)
        by_rank = [[step.numbers for step in one] for one in steps]
        first = together(by_rank, 0)
        assert same(steps[0][0].gradient, gradient_of(first, 64))
        own = gradient_of(by_rank[0][0], 64)
        assert same(steps[0][0].gradient, own) == (name == "none, the same seed")
        reads = len(all_of(by_rank)) // 64
        assert reads == (1 if name == "DistributedSampler" else 4)
        assert name != "none, the same seed" or set(first) == set(by_rank[0][0])
        table.add_row(
            sampler=name,
            processes=4,
            batch_size_per_process=4,
            different_examples_in_step_1=len(set(first)),
            steps_in_an_epoch_of_64=len(by_rank[0]),
            reads_of_an_example=reads,
            **{"gradient, if g is that of rank 0's batch": times(steps[0][0].gradient, own)},
        )


@claim(
    "true when set_epoch is called with its number before every epoch, on every process",
    set_epoch=True,
    fails_when=Change("set_epoch is not called", set_epoch=False),
)
def test_a_sampler_shuffles_anew_with_set_epoch(table: Table, set_epoch: bool) -> None:
    """DistributedSampler(shuffle=True) shuffles anew in every epoch.

    It shuffles by seed + epoch, and learns the epoch from set_epoch only. Without the call all
    epochs have the same batches, and a process only ever sees its part of the data. No gradient is
    wrong.

    It shuffles by seed + epoch, but it does not count epochs: sampler.set_epoch(epoch) tells it the
    epoch. Without the call every epoch has the same batches in the same order, and each process
    only ever sees the same part of the data. No gradient is wrong, and there is no error: only the
    shuffling is lost.
    """
    orders = {}
    for name, calls in (("called", set_epoch), ("not called", False)):
        by_rank = on_ranks("2x2", read, Reading(64, 4, epochs=3, set_epoch=calls))
        orders[name] = len({str(epoch) for epoch in by_rank[0]})
        seen = {number for epoch in by_rank[0] for step in epoch for number in step}
        table.add_row(
            set_epoch=name,
            epochs=3,
            different_orders=orders[name],
            different_examples_that_rank_0_reads=f"{len(seen)} of 64",
        )
    assert orders == {"called": 3, "not called": 1}
