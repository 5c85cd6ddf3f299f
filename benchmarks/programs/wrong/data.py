"""Samplers, loaders and batches that drop, repeat, shift or weigh examples wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from benchmarks.programs.common import (
    EXAMPLES,
    Batch,
    LanguageModel,
    UnderDdp,
    average,
    mean_squared_error,
    part,
    pieces,
    regression,
    texts,
    token_mean,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.unknown import UnknownBecause

programs = Programs("data", right=False)

plain = UnderDdp(mean_squared_error)


def chosen(batch: Any, indices: Any) -> Batch:
    """These examples of the batch."""
    return {name: leaf[torch.as_tensor(list(indices))] for name, leaf in batch.items()}


def odd_batch(generator: torch.Generator) -> Batch:
    """Twenty-five examples, which 2, 3 and 4 ranks cannot share equally."""
    first, second = regression(generator), regression(generator)
    return {name: torch.cat([leaf, second[name][:1]]) for name, leaf in first.items()}


@programs.step(shards="own", unknown=UnknownBecause.IDENTICAL_INPUTS)
def no_sampler(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank trains on the whole batch; the average is right by luck, and nothing is shared.

    The ranks' inputs are the same, so that no check can see whether anything was reduced.
    """
    plain(model, batch, rank)


@programs.step(shards="own", unknown=UnknownBecause.IDENTICAL_INPUTS, layout="1x2")
def no_sampler_and_no_reduction(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank trains on the whole batch by itself, and nothing is reduced."""
    mean_squared_error(model, batch).backward()


@programs.step(shards="own")
def every_rank_the_first_examples(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank takes the first examples, as a sampler with rank 0 everywhere does."""
    plain(model, part(batch, 0, EXAMPLES // rank.world_size), rank)


@programs.step(shards="own")
def sampler_told_it_is_alone(model: nn.Module, batch: Any, rank: Rank) -> None:
    """DistributedSampler got the node's number as rank, so that ranks of a node read the same."""
    sampler: Any = DistributedSampler(range(EXAMPLES), rank.world_size, rank.rank // 2)  # type: ignore[arg-type]
    plain(model, chosen(batch, sampler), rank)


@programs.step(shards="own")
def seeds_differ_by_rank(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The seed of the shuffle has the rank in it, so that shards overlap."""
    sampler: Any = DistributedSampler(
        range(EXAMPLES),  # type: ignore[arg-type]
        rank.world_size,
        rank.rank,
        seed=rank.rank,
    )
    plain(model, chosen(batch, sampler), rank)


@programs.step(shards="own")
def epochs_differ_by_rank(model: nn.Module, batch: Any, rank: Rank) -> None:
    """set_epoch is called on rank 0 alone."""
    sampler: Any = DistributedSampler(range(EXAMPLES), rank.world_size, rank.rank)  # type: ignore[arg-type]
    sampler.set_epoch(1 if rank.rank == 0 else 0)
    plain(model, chosen(batch, sampler), rank)


@programs.step(shards="own")
def shuffled_by_each_loader(model: nn.Module, batch: Any, rank: Rank) -> None:
    """DataLoader(shuffle=True) without a sampler draws anew on each rank, from its own seed."""
    generator = torch.Generator().manual_seed(100 + rank.rank)
    dataset = TensorDataset(batch["rows"], batch["targets"])
    each = EXAMPLES // rank.world_size
    rows, targets = next(iter(DataLoader(dataset, each, shuffle=True, generator=generator)))
    plain(model, {"rows": rows, "targets": targets}, rank)


@programs.step(shards="own", batch=odd_batch)
def padded_by_the_sampler(model: nn.Module, batch: Any, rank: Rank) -> None:
    """DistributedSampler repeats examples until all ranks have equally many."""
    sampler: Any = DistributedSampler(range(25), rank.world_size, rank.rank, shuffle=False)  # type: ignore[arg-type]
    plain(model, chosen(batch, sampler), rank)


@programs.step(shards="own", batch=odd_batch)
def tail_dropped_by_the_sampler(model: nn.Module, batch: Any, rank: Rank) -> None:
    """drop_last leaves out the example that the ranks cannot share."""
    sampler: Any = DistributedSampler(
        range(25),  # type: ignore[arg-type]
        rank.world_size,
        rank.rank,
        shuffle=False,
        drop_last=True,
    )
    plain(model, chosen(batch, sampler), rank)


@programs.step(shards="own", batch=odd_batch)
def strided_with_a_longer_first(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Rank 0 has one example more than the others, and ranks count equally."""
    plain(model, chosen(batch, range(rank.rank, 25, rank.world_size)), rank)


@programs.step(shards="own")
def last_incomplete_batch_dropped(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The loader's drop_last leaves out the rest of each shard that fills no micro-batch."""
    mine = chosen(batch, range(rank.rank, EXAMPLES, rank.world_size))
    window = [each for each in pieces(mine, 5) if len(each["rows"]) == 5]
    ddp = DistributedDataParallel(model)
    sum(mean_squared_error(ddp, each) / len(window) for each in window).backward()


@programs.step(shards="own")
def blocks_that_overlap(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Each block is one example too long."""
    each = EXAMPLES // rank.world_size
    plain(model, part(batch, rank.rank * each, (rank.rank + 1) * each + 1), rank)


@programs.step(shards="own")
def blocks_with_a_gap(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Each block starts one example too late."""
    each = EXAMPLES // rank.world_size
    plain(model, part(batch, rank.rank * each + 1, (rank.rank + 1) * each), rank)


@programs.step(shards="own", layout="2x2")
def local_rank_instead_of_rank(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The shard is chosen by the local rank, so that both nodes read the same."""
    each = EXAMPLES // rank.world_size
    plain(model, part(batch, rank.local_rank * each, (rank.local_rank + 1) * each), rank)


@programs.step(shards="own", layout="2x2")
def local_world_size_instead_of_all(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The shard is a half, chosen by the local rank; half of the pairs read the same."""
    mine = chosen(batch, range(rank.local_rank, EXAMPLES, rank.local_world_size + 1))
    plain(model, mine, rank)


@programs.step(shards="own", layout="2x2")
def nodes_read_the_same(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every node reads the first half of the batch."""
    mine = chosen(batch, range(rank.local_rank, EXAMPLES // 2, rank.local_world_size))
    plain(model, mine, rank)


class Stream(IterableDataset[Any]):
    """Yields examples; it knows nothing of ranks but where to start."""

    def __init__(self, batch: Batch, start: int) -> None:
        self.batch, self.start = batch, start

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self.start, EXAMPLES):
            yield {name: leaf[index] for name, leaf in self.batch.items()}


@programs.step(shards="own")
def streams_that_only_start_apart(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank skips to its first example, and then reads all that follow."""
    each = EXAMPLES // rank.world_size
    loader = DataLoader(Stream(batch, rank.rank), batch_size=each)
    plain(model, next(iter(loader)), rank)


@programs.step(shards="own", layout="1x2")
def stream_doubled_by_workers(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Both workers of the loader read the same stream, whose examples come twice."""
    loader = DataLoader(Stream(batch, 12 * rank.rank), batch_size=6, num_workers=2)
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, next(iter(loader)))).backward()


@programs.step()
def targets_shifted_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """On rank 1 each row meets the target of the row before it."""
    if rank.rank == 1:
        shard = shard | {"targets": shard["targets"].roll(1, 0)}
    plain(model, shard, rank)


@programs.step()
def targets_of_another_order(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rows are shuffled, and their targets stay where they were."""
    order = torch.arange(len(shard["rows"])).flip(0)
    plain(model, shard | {"rows": shard["rows"][order]}, rank)


@programs.step()
def normalised_by_the_shard(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rows are standardised with the mean and deviation of the rank's own."""
    rows = (shard["rows"] - shard["rows"].mean(0)) / shard["rows"].std(0)
    plain(model, shard | {"rows": rows}, rank)


@programs.step()
def noise_added_by_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rows are augmented with noise of a thousandth, drawn on each rank."""
    noise = torch.randn(shard["rows"].shape, generator=torch.Generator().manual_seed(rank.rank))
    plain(model, shard | {"rows": shard["rows"] + 1e-3 * noise}, rank)


def thirds(generator: torch.Generator) -> Batch:
    """Rows that float32 cannot hold exactly."""
    return {name: leaf.double() / 3 for name, leaf in regression(generator).items()}


@programs.step(batch=thirds)
def rounded_to_float32_on_the_way(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loader turns float64 rows into float32 and back."""
    plain(model, shard | {"rows": shard["rows"].float().double()}, rank)


@programs.step()
def first_example_counts_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The first example of every shard is repeated by the collate function."""
    plain(model, {name: torch.cat([leaf[:1], leaf]) for name, leaf in shard.items()}, rank)


@programs.step()
def one_example_lost_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A bad file is skipped on the last rank, whose other examples count more."""
    lost = int(rank.rank == rank.world_size - 1)
    plain(model, part(shard, lost, len(shard["rows"])), rank)


@programs.step(shards="own")
def same_data_from_a_broadcast(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank takes its own rows, and then receives those of rank 0."""
    mine = chosen(batch, range(rank.rank, EXAMPLES, rank.world_size))
    model(mine["rows"])
    for leaf in mine.values():
        dist.broadcast(leaf, src=0)
    plain(model, mine, rank)


@programs.step(model=LanguageModel, batch=texts, loss=token_mean, shards="interleaved")
def texts_cut_to_half(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank cuts its texts to half of the longest, and loses tokens."""
    mine = {name: leaf[:, :3] for name, leaf in shard.items()}
    UnderDdp(token_mean)(model, mine, rank)


@programs.step(shards="own")
def masked_without_the_world_size(model: nn.Module, batch: Any, rank: Rank) -> None:
    """A rank lets only its own examples count, divides by all, and then averages."""
    mine = chosen(batch, range(rank.rank, EXAMPLES, rank.world_size))
    ((model(mine["rows"]) - mine["targets"]).square().mean(1).sum() / EXAMPLES).backward()
    average(model, rank)
