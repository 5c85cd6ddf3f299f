"""Right ways to hand every rank its examples: samplers, loaders, slices, scatters and masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
    random_split,
)

from benchmarks.programs.common import (
    EXAMPLES,
    LENGTH,
    Batch,
    LanguageModel,
    UnderDdp,
    mean_squared_error,
    regression,
    sequences,
    texts,
    token_mean,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("data", right=True)

plain = UnderDdp(mean_squared_error)


def loaded(batch: Any, rank: Rank, *, workers: int = 0, **sampling: Any) -> Batch:
    """What a DataLoader gives this rank in one batch."""
    dataset = TensorDataset(batch["rows"], batch["targets"])
    sampler: Any = DistributedSampler(dataset, rank.world_size, rank.rank, **sampling)
    sampler.set_epoch(3)
    each = EXAMPLES // rank.world_size
    loader = DataLoader(dataset, each, sampler=sampler, num_workers=workers)
    rows, targets = next(iter(loader))
    return {"rows": rows, "targets": targets}


@programs.step(shards="own")
def sampler_in_order(model: nn.Module, batch: Any, rank: Rank) -> None:
    """DistributedSampler deals the examples out in turn."""
    plain(model, loaded(batch, rank, shuffle=False), rank)


@programs.step(shards="own")
def sampler_that_shuffles_by_epoch(model: nn.Module, batch: Any, rank: Rank) -> None:
    """DistributedSampler shuffles all ranks in the same way, by seed and epoch."""
    plain(model, loaded(batch, rank, shuffle=True, seed=11), rank)


@programs.step(shards="own")
def sampler_that_may_drop(model: nn.Module, batch: Any, rank: Rank) -> None:
    """drop_last drops nothing, since the ranks share the examples equally."""
    plain(model, loaded(batch, rank, shuffle=True, drop_last=True), rank)


@programs.step(shards="own", layout="1x2")
def loader_with_one_worker(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The DataLoader reads in one process of its own."""
    plain(model, loaded(batch, rank, shuffle=False, workers=1), rank)


@programs.step(shards="own", layout="1x2")
def loader_with_two_workers(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The DataLoader reads and shuffles with two processes."""
    plain(model, loaded(batch, rank, shuffle=True, workers=2), rank)


@programs.step(shards="own")
def every_fourth_example(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The rank takes every W-th example, from its own number on."""
    mine = {name: leaf[rank.rank :: rank.world_size] for name, leaf in batch.items()}
    plain(model, mine, rank)


@programs.step(shards="own")
def one_block_each(model: nn.Module, batch: Any, rank: Rank) -> None:
    """tensor_split gives each rank one block."""
    mine = {n: leaf.tensor_split(rank.world_size)[rank.rank] for n, leaf in batch.items()}
    plain(model, mine, rank)


@programs.step(shards="own")
def permuted_with_a_common_seed(model: nn.Module, batch: Any, rank: Rank) -> None:
    """All ranks draw the same permutation, and take their own part of it."""
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(8))
    mine = order.chunk(rank.world_size)[rank.rank]
    plain(model, {name: leaf[mine] for name, leaf in batch.items()}, rank)


@programs.step(shards="own")
def permutation_broadcast(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Rank 0 draws a permutation and broadcasts it."""
    order = torch.randperm(EXAMPLES) if rank.rank == 0 else torch.empty(EXAMPLES).long()
    dist.broadcast(order, src=0)
    mine = order[rank.rank :: rank.world_size]
    plain(model, {name: leaf[mine] for name, leaf in batch.items()}, rank)


@programs.step(shards="own")
def scattered_from_rank_zero(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Rank 0 has the data, and scatters a part to each rank."""
    mine = {}
    for name, leaf in batch.items():
        parts = [part.contiguous() for part in leaf.chunk(rank.world_size)]
        mine[name] = torch.empty_like(parts[0])
        dist.scatter(mine[name], parts if rank.rank == 0 else None, src=0)
    plain(model, mine, rank)


@programs.step(shards="own", layout="2x2")
def by_node_and_local_rank(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Each node has a half of the examples, and each of its ranks a part of that."""
    mine = {
        name: leaf.chunk(rank.nodes)[rank.node].chunk(rank.local_world_size)[rank.local_rank]
        for name, leaf in batch.items()
    }
    plain(model, mine, rank)


@programs.step(shards="own")
def subset_of_a_random_split(model: nn.Module, batch: Any, rank: Rank) -> None:
    """random_split with a common generator gives each rank one part."""
    dataset = TensorDataset(batch["rows"], batch["targets"])
    lengths = [EXAMPLES // rank.world_size] * rank.world_size
    mine = random_split(dataset, lengths, torch.Generator().manual_seed(4))[rank.rank]
    rows, targets = default_collate([mine[number] for number in range(len(mine))])
    plain(model, {"rows": rows, "targets": targets}, rank)


class Rows(Dataset[Any]):
    """One dict for each example."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["rows"])

    def __getitem__(self, index: int) -> Batch:
        return {name: leaf[index] for name, leaf in self.batch.items()}


@programs.step(shards="own")
def micro_batches_from_a_loader(model: nn.Module, batch: Any, rank: Rank) -> None:
    """A BatchSampler over a Subset yields micro-batches of four and a smaller last one."""
    mine = Subset(Rows(batch), range(rank.rank, EXAMPLES, rank.world_size))
    loader = DataLoader(mine, batch_sampler=BatchSampler(SequentialSampler(mine), 5, False))
    ddp = DistributedDataParallel(model)
    losses = [mean_squared_error(ddp, each) * len(each["rows"]) / len(mine) for each in loader]
    sum(losses).backward()


class Stream(IterableDataset[Any]):
    """Yields the examples of one rank, and of one worker of its loader if there are several."""

    def __init__(self, batch: Batch, rank: Rank) -> None:
        self.batch, self.rank = batch, rank

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(self.rank.rank, EXAMPLES, self.rank.world_size):
            if (index // self.rank.world_size) % of == number:
                yield {name: leaf[index] for name, leaf in self.batch.items()}


def streamed(model: nn.Module, batch: Batch, rank: Rank, workers: int) -> None:
    """Train on a stream in batches of three, each with its share of the examples."""
    ddp = DistributedDataParallel(model)
    loader = DataLoader(Stream(batch, rank), batch_size=3, num_workers=workers)
    each = EXAMPLES // rank.world_size
    sum(mean_squared_error(ddp, one) * len(one["rows"]) / each for one in loader).backward()


@programs.step(shards="own")
def stream_of_examples(model: nn.Module, batch: Any, rank: Rank) -> None:
    """An IterableDataset leaves out the examples of other ranks."""
    streamed(model, batch, rank, workers=0)


@programs.step(shards="own", layout="1x2")
def stream_with_two_workers(model: nn.Module, batch: Any, rank: Rank) -> None:
    """An IterableDataset leaves out the examples of other ranks and of other workers."""
    streamed(model, batch, rank, workers=2)


class Sample(NamedTuple):
    """A batch with names for its parts."""

    rows: Tensor
    targets: Tensor


def sample_loss(model: nn.Module, batch: Sample) -> Tensor:
    """The mean squared error of a named tuple."""
    return F.mse_loss(model(batch.rows), batch.targets)


def samples(generator: torch.Generator) -> Sample:
    """A named tuple."""
    return Sample(**regression(generator))


@programs.step(batch=samples, loss=sample_loss)
def named_tuples(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The batch is a NamedTuple."""
    UnderDdp(sample_loss)(model, shard, rank)


@programs.loss(batch=lambda generator: list(regression(generator).values()))
def lists_of_two(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The batch is a list of inputs and targets, as a DataLoader gives it."""
    return F.mse_loss(model(batch[0]), batch[1])


@programs.loss(batch=lambda generator: {"x": {"in": regression(generator)}, "scale": 0.5})
def nested_dicts_with_a_number(model: nn.Module, batch: Any) -> Tensor:
    """The batch is a dict in a dict, with a number beside the tensors."""
    inner = batch["x"]["in"]
    return F.mse_loss(model(inner["rows"]), batch["scale"] * inner["targets"])


@programs.step(shards="interleaved", model=LanguageModel, batch=texts, loss=token_mean)
def trimmed_to_the_longest_text(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank cuts its texts to its own longest, and divides by the tokens of all ranks."""
    longest = int((shard["targets"] >= 0).sum(1).max())
    short = {name: leaf[:, :longest] for name, leaf in shard.items()}
    tokens = (short["targets"] >= 0).sum().double()
    mine = tokens.item()
    dist.all_reduce(tokens)
    ddp = DistributedDataParallel(model)
    (token_mean(ddp, short) * mine * rank.world_size / tokens.item()).backward()


@programs.loss(batch=sequences)
def masked_positions(model: nn.Module, batch: Batch) -> Tensor:
    """Positions behind a mask add nothing, and each example divides by its own positions."""
    lengths = 1 + (batch["rows"][:, 0, 0] > 0).long() * (LENGTH // 2)
    keep = torch.arange(LENGTH) < lengths[:, None]
    outputs = (model(batch["rows"]) * keep[..., None]).sum(1) / lengths[:, None]
    return F.mse_loss(outputs, batch["targets"])


def small_integers(generator: torch.Generator) -> Batch:
    """Pixels from 0 to 255 as bytes, and targets."""
    batch = regression(generator)
    return batch | {"rows": (batch["rows"].sigmoid() * 255).to(torch.uint8)}


@programs.loss(batch=small_integers)
def bytes_scaled_in_the_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The rows are bytes, which the loss scales to numbers from -1 to 1."""
    rows = batch["rows"].to(batch["targets"].dtype) / 127.5 - 1
    return F.mse_loss(model(rows), batch["targets"])


@programs.step(shards="own", layout="1x3")
def uneven_blocks_of_its_own(model: nn.Module, batch: Any, rank: Rank) -> None:
    """The ranks choose 4, 8 and 12 examples, and count by their number."""
    start, stop = ((0, 4), (4, 12), (12, 24))[rank.rank]
    mine = {name: leaf[start:stop] for name, leaf in batch.items()}
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, mine) * (stop - start) * rank.world_size / EXAMPLES).backward()


@programs.step(shards="own")
def everyone_reads_and_masks(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank computes all outputs and lets only its own examples count, W times as much.

    The model is called with the same inputs on all ranks, so that nothing is shown.
    """
    ddp = DistributedDataParallel(model)
    each = (ddp(batch["rows"]) - batch["targets"]).square().mean(1)
    mine = torch.arange(EXAMPLES) % rank.world_size == rank.rank
    (rank.world_size * (each * mine).mean()).backward()
