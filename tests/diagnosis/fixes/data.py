"""Ranks that begin with other weights, or read other examples, than they should."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from ddp_equivalence import Rank
from tests.diagnosis.fixes.programs import Batch, shows
from tests.diagnosis.names.small_case import average, case
from tests.package.own_cases import loss, make_batch

OWN = case(shards="own")
THIRTEEN = case(shards="own", batch=partial(make_batch, count=13))


@shows(
    "weights_differ_between_ranks",
    "broadcast all 4 parameters from rank 0 before the first forward pass.",
    {
        "    loss(model": "    for parameter in model.parameters():\n"
        "        dist.broadcast(parameter.data, src=0)\n    loss(model"
    },
)
def only_rank_0_keeps_its_checkpoint(model: Any, shard: Batch, rank: Rank) -> None:
    if rank.rank > 0:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
    loss(model, shard).backward()
    average(model, rank.world_size)


@shows(
    "weights_differ_between_ranks",
    "broadcast all 4 parameters from rank 0 before the first forward pass.",
    {"parameter.data, src=2 * rank.node, group=groups[rank.node]": "parameter.data, src=0"},
    case("2x2"),
)
def broadcasts_inside_the_nodes(model: Any, shard: Batch, rank: Rank) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank.rank > 0:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1 * rank.rank)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=2 * rank.node, group=groups[rank.node])
    loss(model, shard).backward()
    average(model, rank.world_size)


@shows(
    "weights_differ_between_ranks",
    "broadcast all 4 parameters from rank 0 before the first forward pass.",
    {
        "    loss(ddp": "    for parameter in model.parameters():\n"
        "        dist.broadcast(parameter.data, src=0)\n    loss(ddp"
    },
)
def loads_after_wrapping(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    if rank.rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    loss(ddp, shard).backward()


@shows(
    "every_rank_same_data",
    "give the DataLoader a DistributedSampler.",
    {"batch_size=6)": "batch_size=6, sampler=DistributedSampler(data))"},
    OWN,
)
def has_no_sampler(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["rows"], batch["targets"])
    for rows, targets in DataLoader(data, batch_size=6):
        F.mse_loss(ddp(rows), targets).backward()
        break


@shows(
    "ranks_shuffle_apart",
    "give the DataLoader a DistributedSampler in place of shuffle=True.",
    {"shuffle=True": "sampler=DistributedSampler(data)"},
    OWN,
)
def shuffles_without_a_sampler(model: Any, batch: Batch, rank: Rank) -> None:
    data = TensorDataset(batch["rows"], batch["targets"])
    rows, targets = next(iter(DataLoader(data, batch_size=6, shuffle=True)))
    F.mse_loss(model(rows), targets).backward()
    average(model, rank.world_size)


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """The examples one after the other."""

    def __init__(self, batch: Batch, rank: Rank) -> None:
        self.batch, self.rank = batch, rank

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for number, one in enumerate(zip(self.batch["rows"], self.batch["targets"], strict=True)):
            if number < 6:
                yield one


@shows(
    "every_rank_same_data",
    "let rank r read only examples r, r + 2, r + 4, and so on.",
    {"if number < 6:": "if number in range(self.rank.rank, 12, 2):"},
    OWN,
    Stream,
)
def reads_a_stream(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for rows, targets in DataLoader(Stream(batch, rank), batch_size=6):
        F.mse_loss(ddp(rows), targets).backward()


@shows(
    "every_rank_same_data",
    "let rank r read only examples r, r + 2, r + 4, and so on.",
    {"BatchSampler(SequentialSampler(data)": "BatchSampler(range(rank.rank, 12, 2)"},
    OWN,
)
def has_a_batch_sampler(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["rows"], batch["targets"])
    batches = BatchSampler(SequentialSampler(data), 6, False)
    rows, targets = next(iter(DataLoader(data, batch_sampler=batches)))
    F.mse_loss(ddp(rows), targets).backward()


@shows(
    "every_rank_same_data",
    "give DistributedSampler num_replicas=2, each rank's own rank, and the same seed on all ranks.",
    {"rank=0": "rank=rank.rank"},
    OWN,
)
def every_sampler_is_that_of_rank_0(model: Any, batch: Batch, rank: Rank) -> None:
    data = TensorDataset(batch["rows"], batch["targets"])
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    for rows, targets in DataLoader(data, batch_size=6, sampler=sampler):
        F.mse_loss(model(rows), targets).backward()
    average(model, rank.world_size)


@shows(
    "every_rank_same_data",
    "let rank r read only examples r, r + 2, r + 4, and so on.",
    {"slice(0, share)": "slice(rank.rank, None, 2)"},
    OWN,
)
def every_rank_takes_the_first_slice(model: Any, batch: Batch, rank: Rank) -> None:
    share = len(batch["rows"]) // rank.world_size
    own = slice(0, share)
    loss(model, {name: leaf[own] for name, leaf in batch.items()}).backward()
    average(model, rank.world_size)


@shows(
    "every_rank_same_data",
    "leave the broadcast out: each rank has read rows of its own.",
    {
        "    for leaf in batch.values():\n        dist.broadcast(leaf, src=0)\n": "",
    },
)
def rank_0_broadcasts_its_rows(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    batch = {name: leaf.clone() for name, leaf in shard.items()}
    for leaf in batch.values():
        dist.broadcast(leaf, src=0)
    loss(ddp, batch).backward()


@shows(
    "ranks_shuffle_apart",
    "shuffle with the same seed on every rank, and take the rank's slice of that one order.",
    {"manual_seed(5 + rank.rank)": "manual_seed(5)"},
    OWN,
)
def permutes_by_rank(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5 + rank.rank))
    own = order[6 * rank.rank : 6 * rank.rank + 6]
    loss(ddp, {name: leaf[own] for name, leaf in batch.items()}).backward()


@shows(
    "ranks_shuffle_apart",
    "give DistributedSampler num_replicas=2, each rank's own rank, and the same seed on all ranks.",
    {"seed=rank.rank": "seed=0"},
    OWN,
)
def seeds_the_sampler_by_rank(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["rows"], batch["targets"])
    sampler: Any = DistributedSampler(data, 2, rank.rank, shuffle=True, seed=rank.rank)
    for rows, targets in DataLoader(data, batch_size=6, sampler=sampler):
        F.mse_loss(ddp(rows), targets).backward()


@shows(
    "ranks_shuffle_apart",
    "shuffle with the same seed on every rank, and take the rank's slice of that one order.",
    {"Random(rank.rank)": "Random(0)"},
    OWN,
)
def shuffles_a_list_by_rank(model: Any, batch: Batch, rank: Rank) -> None:
    order = list(range(12))
    random.Random(rank.rank).shuffle(order)
    loss(model, {name: leaf[order[rank.rank :: 2]] for name, leaf in batch.items()}).backward()
    average(model, rank.world_size)


@shows(
    "shares_overlap",
    "let exactly one rank read each of the 12 examples.",
    {"max(0, 6 * rank.rank - 1)": "6 * rank.rank"},
    OWN,
)
def slices_begin_too_early(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    first = max(0, 6 * rank.rank - 1)
    loss(ddp, {name: leaf[first : first + 6] for name, leaf in batch.items()}).backward()


@shows(
    "shares_overlap",
    "let exactly one rank read each of the 12 examples.",
    {"rank.local_rank ::": "rank.rank ::"},
    case("2x2", shards="own"),
)
def strides_by_local_rank(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    own = {n: leaf[rank.local_rank :: rank.world_size] for n, leaf in batch.items()}
    loss(ddp, own).backward()


@shows(
    "sampler_padding_counted",
    "count every example once: give repetitions no weight, and divide the sum of the "
    "examples' losses by 13, and multiply it by 2 (world size).",
    {
        "F.mse_loss(ddp(rows), targets).backward()": "weight = torch.ones(len(rows), 1)\n"
        "        if rank.rank == 1:\n            weight[-1] = 0\n"
        "        (2 * (weight * (ddp(rows) - targets) ** 2).mean(1).sum() / 13).backward()"
    },
    THIRTEEN,
)
def a_sampler_pads(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["rows"], batch["targets"])
    sampler: Any = DistributedSampler(data, 2, rank.rank, shuffle=False)
    for rows, targets in DataLoader(data, batch_size=7, sampler=sampler):
        F.mse_loss(ddp(rows), targets).backward()


@shows(
    "sampler_padding_counted",
    "count every example once: give repetitions no weight, and divide the sum of the "
    "examples' losses by 13, and add the ranks' gradients up.",
    {
        "order += order[: -len(order) % rank.world_size]": "pass",
        ".backward()": ".mul(len(own) / 13).backward()",
        "average(model, rank.world_size)": "average(model, 1)",
    },
    THIRTEEN,
)
def pads_a_list(model: Any, batch: Batch, rank: Rank) -> None:
    order = list(range(13))
    order += order[: -len(order) % rank.world_size]
    own = order[rank.rank :: rank.world_size]
    loss(model, {name: leaf[own] for name, leaf in batch.items()}).backward()
    average(model, rank.world_size)


@shows(
    "examples_dropped",
    "let a rank read them too, and divide the sum of the examples' losses by 13, and multiply"
    " it by 2 (world size).",
    {
        "* share + share": "* share + share + rank.rank % 2",
        "loss(ddp, own)": '(2 * len(own["rows"]) / 13 * loss(ddp, own))',
    },
    THIRTEEN,
)
def rounds_its_share_down(model: Any, batch: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    share = len(batch["rows"]) // rank.world_size
    own = {n: leaf[rank.rank * share : rank.rank * share + share] for n, leaf in batch.items()}
    loss(ddp, own).backward()


@shows(
    "examples_dropped",
    "let a rank read them too, and divide the sum of the examples' losses by 13, and add the "
    "ranks' gradients up.",
    {
        "drop_last=True": "drop_last=False",
        "F.mse_loss(model(rows), targets).backward()": "keep = slice(None, 7 - rank.rank)\n"
        "        error = (model(rows[keep]) - targets[keep]).square().mean(1).sum() / 13\n"
        "        error.backward()",
        "average(model, rank.world_size)": "average(model, 1)",
    },
    THIRTEEN,
)
def a_sampler_drops(model: Any, batch: Batch, rank: Rank) -> None:
    data = TensorDataset(batch["rows"], batch["targets"])
    sampler: Any = DistributedSampler(data, 2, rank.rank, shuffle=False, drop_last=True)
    for rows, targets in DataLoader(data, batch_size=7, sampler=sampler):
        F.mse_loss(model(rows), targets).backward()
    average(model, rank.world_size)


@shows(
    "examples_dropped",
    "let a rank read them too, and divide the sum of the examples' losses by 12, and multiply"
    " it by 2 (world size).",
    {"drop_last=True": "drop_last=False", "/ 1)": "* len(rows) / 6)"},
)
def a_loader_drops(model: Any, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(shard["rows"], shard["targets"])
    for rows, targets in DataLoader(data, batch_size=4, drop_last=True):
        (F.mse_loss(ddp(rows), targets) / 1).backward()
