"""Steps whose ranks take wrong shares of the examples, in many shapes of code."""

# mypy: disable-error-code="arg-type, union-attr, index, no-any-return, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Batch = dict[str, Tensor]


def train_on(model: nn.Module, mine: Batch, examples: int) -> None:
    """Every example counts 1 / examples."""
    errors = (model(mine["x"]) - mine["y"]).square().mean(1)
    (errors.sum() / examples).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def reader_of(rank: Any, examples: int) -> Callable[[Batch], Batch]:
    """A closure that knows the rank."""
    size = examples // rank.world_size
    begin = rank.local_rank * size

    def read(batch: Batch) -> Batch:
        return {name: leaf[begin : begin + size] for name, leaf in batch.items()}

    return read


def in_a_closure(model: nn.Module, batch: Batch, rank: Any) -> None:
    read = reader_of(rank, len(batch["x"]))
    train_on(model, read(batch), len(batch["x"]))


def in_a_comprehension(model: nn.Module, batch: Batch, rank: Any) -> None:
    count = len(batch["x"])
    own = [one for one in range(count) if (one + rank.node) % rank.world_size == rank.rank]
    train_on(model, {name: leaf[own] for name, leaf in batch.items()}, count)


def dealt(rows: Any, me: int, others: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number, row in enumerate(rows):
        if number % others != max(me - 1, 0):
            continue
        yield row


def in_a_generator(model: nn.Module, batch: Batch, rank: Any) -> None:
    rows = zip(batch["x"], batch["y"], strict=True)
    inputs, targets = zip(*dealt(rows, dist.get_rank(), dist.get_world_size()), strict=True)
    mine = {"x": torch.stack(inputs), "y": torch.stack(targets)}
    train_on(model, mine, len(batch["x"]))


class Window:
    """The rows of one worker, as properties."""

    def __init__(self, batch: Batch, worker: Any) -> None:
        self.batch = batch
        self.worker = worker

    @property
    def size(self) -> int:
        return len(self.batch["x"]) // self.worker.world_size

    @property
    def first(self) -> int:
        return self.worker.rank * self.size

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.size + 1)

    def __getitem__(self, name: str) -> Tensor:
        return self.batch[name][self.rows]


def in_properties(model: nn.Module, batch: Batch, rank: Any) -> None:
    window = Window(batch, rank)
    train_on(model, {"x": window["x"], "y": window["y"]}, len(batch["x"]))


class Span(NamedTuple):
    """Consecutive rows."""

    begin: int
    length: int


def span_of(rank: Any) -> Span:
    return Span(begin=3 * rank.rank, length=4)


def in_a_tuple(model: nn.Module, batch: Batch, rank: Any) -> None:
    span = span_of(rank)
    mine = {name: leaf.narrow(0, span.begin, span.length) for name, leaf in batch.items()}
    train_on(model, mine, len(batch["x"]))


def positions(count: int, rank: Any) -> Any:
    return np.array_split(np.arange(count), rank.world_size + 1)[rank.rank]


def in_an_array(model: nn.Module, batch: Batch, rank: Any) -> None:
    own = torch.from_numpy(positions(len(batch["x"]), rank))
    mine = {name: leaf.index_select(0, own) for name, leaf in batch.items()}
    train_on(model, mine, len(batch["x"]))


class Stream:
    """Goes through the rows of a rank."""

    def __init__(self, batch: Batch, rank: Any) -> None:
        self.pairs = list(zip(batch["x"], batch["y"], strict=True))
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from islice(self.pairs, self.rank.rank, None, self.rank.world_size)


def in_two_places(model: nn.Module, batch: Batch, rank: Any) -> None:
    stream = Stream(batch, rank)
    kept = [row for place, row in enumerate(stream) if place % rank.world_size == rank.rank]
    mine = {
        name: torch.stack(parts) for name, parts in zip("xy", zip(*kept, strict=True), strict=True)
    }
    train_on(model, mine, len(batch["x"]))


def in_parts(model: nn.Module, batch: Batch, rank: Any) -> None:
    share = {name: leaf.split(3)[int(rank)] for name, leaf in batch.items()}
    train_on(model, share, len(batch["x"]))


def loaded(batch: Batch, sampler: Any) -> Batch:
    data = TensorDataset(batch["x"], batch["y"])
    inputs, targets = next(iter(DataLoader(data, batch_size=len(data), sampler=sampler)))
    return {"x": inputs, "y": targets}


class Sampled:
    """Makes a sampler with what it has kept of the rank."""

    def __init__(self, rank: Any) -> None:
        self.place = rank.local_rank
        self.workers = rank.world_size

    def sampler(self, data: Any) -> Any:
        return DistributedSampler(data, self.workers, self.place, shuffle=False)


def in_a_sampler(model: nn.Module, batch: Batch, rank: Any) -> None:
    mine = loaded(batch, Sampled(rank).sampler(batch["x"]))
    train_on(model, mine, len(batch["x"]))


def in_a_sampler_of_too_many(model: nn.Module, batch: Batch, rank: Any) -> None:
    workers = rank.world_size * 2
    sampler = DistributedSampler(batch["x"], num_replicas=workers, rank=rank.rank, shuffle=False)
    train_on(model, loaded(batch, sampler), len(batch["x"]))


def beside_another_fault(model: nn.Module, batch: Batch, rank: Any) -> None:
    in_a_closure(model, batch, rank)
    model[0].bias.grad[rank.rank] += 0.1


def right_shares_and_a_wrong_factor(model: nn.Module, batch: Batch, rank: Any) -> None:
    own = slice(int(rank), None, rank.world_size)
    train_on(model, {name: leaf[own] for name, leaf in batch.items()}, len(batch["x"]) * 3)


class Worker:
    """Who works, in words of its own."""

    def __init__(self) -> None:
        self.crew = dist.get_world_size()
        self.badge = dist.get_rank()


class Blocks:
    """A sampler that deals consecutive positions of a shuffled order."""

    def __init__(self, length: int, worker: Worker) -> None:
        self.length, self.worker = length, worker

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(3)).tolist()
        each = self.length // self.worker.crew
        low = self.worker.badge * each
        high = low + each + 1
        return iter(order[low:high])


def in_words_of_its_own(model: nn.Module, batch: Batch, rank: Any) -> None:
    mine = loaded(batch, Blocks(len(batch["x"]), Worker()))
    train_on(model, mine, len(batch["x"]))


class Every(torch.utils.data.Dataset[Any]):
    """A data set that computes the position of each row."""

    def __init__(self, batch: Batch, badge: int, crew: int) -> None:
        self.batch = batch
        self.badge, self.crew = badge, crew

    def __len__(self) -> int:
        return len(self.batch["x"]) // self.crew

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        at = number * self.crew + self.badge // 2
        return self.batch["x"][at], self.batch["y"][at]


def in_a_data_set(model: nn.Module, batch: Batch, rank: Any) -> None:
    data = Every(batch, rank.rank, rank.world_size)
    inputs, targets = next(iter(DataLoader(data, batch_size=len(data))))
    train_on(model, {"x": inputs, "y": targets}, len(batch["x"]))
