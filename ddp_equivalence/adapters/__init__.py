"""Steps for ``check`` that train with somebody else's trainer.

Each module needs the library of its name: ``transformers`` (and TRL's trainers), ``accelerate``,
``lightning``. This module has what they share: a data set of the examples, and the room in which a
trainer works. The case has ``shards="own"``, so that every rank holds all examples and the trainer
deals them to the ranks as it does in training.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from ddp_equivalence.case.batch_tree import map_tensors, tensors_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.random_state import restored_random_state
from ddp_equivalence.ranks.rank import Rank

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
"""Makes the optimizer of a list of parameters, as ``check(..., optimizer=...)`` takes it."""

DISTRIBUTED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
"""Variables of torchrun by which a trainer knows that it is one of several processes."""


def plain_sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer of ``check`` where none is given."""
    return SGD(parameters, lr=0.1)


class Rows(Dataset[Any]):
    """The examples of a batch, one by one. Examples are along dim 0 of every tensor."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.count = len(tensors_of(batch)[0])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda leaf: leaf[index], self.batch)


def micro_batch_size(examples: int, rank: Rank, steps: int, accumulation: int) -> int:
    """The number of examples that one forward pass of one rank takes.

    Raises BadCase if the examples cannot be divided evenly.
    """
    parts = steps * rank.world_size * accumulation
    if examples % parts:
        right = (
            f"a multiple of {parts}: {steps} steps x {rank.world_size} ranks x {accumulation} "
            "micro-batches; or give the batch size of the trainer yourself"
        )
        raise BadCase("batch", f"{examples} examples", right)
    return examples // parts


@contextmanager
def trainers_room(rank: Rank) -> Iterator[str]:
    """A temporary folder for the trainer's files, and the process as it was when the block ends.

    A trainer that sets seeds, variables or the number of threads changes nothing for the next case.
    Where the layout has one process, the trainer sees none of torchrun's variables, and so trains
    as a script does that is started with ``python``.
    """
    variables, threads = dict(os.environ), torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(restored_random_state())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if rank.world_size == 1:
            for name in DISTRIBUTED_VARIABLES:
                os.environ.pop(name, None)
        try:
            yield folder
        finally:
            os.environ.clear()
            os.environ.update(variables)
            torch.set_num_threads(threads)
