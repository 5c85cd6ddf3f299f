"""What the catalogue must know of a model to make a case of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROW_SIZE, HIDDEN_SIZE, OUTPUT_SIZE = 7, 11, 13
SEQUENCE_LENGTH, VOCABULARY_SIZE = 9, 17
"""Pairwise coprime, and coprime to the world sizes 2, 4, 8, to 3 micro-batches and to 5 rows a
rank, so that a factor in a wrong gradient can have only one origin."""


def rows(generator: torch.Generator, examples: int) -> Tensor:
    """Standard normal inputs of shape (examples, ROW_SIZE)."""
    return torch.randn(examples, ROW_SIZE, generator=generator)


def token_ids(generator: torch.Generator, examples: int) -> Tensor:
    """Token ids of shape (examples, SEQUENCE_LENGTH)."""
    shape = (examples, SEQUENCE_LENGTH)
    return torch.randint(VOCABULARY_SIZE, shape, generator=generator)


@dataclass(frozen=True)
class CatalogueModel:
    """One model of the catalogue.

    ``build()`` makes it from torch's global seed. ``inputs(generator, examples)`` has its examples
    along dim 0. ``output`` is ``"vector"``, shape (examples, output_size), or ``"tokens"``, shape
    (examples, SEQUENCE_LENGTH, output_size).
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Tensor] = rows
    output: str = "vector"
    output_size: int = OUTPUT_SIZE
    unused_on_some_ranks: bool = False
    """Needs DDP(find_unused_parameters=True)."""
    sparse_gradients: bool = False
    """NCCL cannot all-reduce sparse tensors."""
    batch_coupled: str | None = None
    """The cause's name, where an example's gradient depends on the other examples or its place."""
