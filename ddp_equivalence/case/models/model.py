"""An entry of the catalogue of models: the model, its inputs, and what is special about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROW_SIZE, HIDDEN_SIZE, OUTPUT_SIZE = 7, 11, 13
SEQUENCE_LENGTH, VOCABULARY_SIZE = 9, 17
"""These sizes are pairwise coprime. They are also coprime to the world sizes 2, 4 and 8, to the 3
micro-batches and to the 5 examples per rank, so that a factor in a wrong gradient can have only one
origin."""


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

    ``build()`` makes the model, with weights drawn from torch's global generator.
    ``inputs(generator, examples)`` makes its inputs, with examples along dim 0. ``output`` is
    ``"vector"``, of shape (examples, output_size), or ``"tokens"``, of shape
    (examples, SEQUENCE_LENGTH, output_size).
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Tensor] = rows
    output: str = "vector"
    output_size: int = OUTPUT_SIZE
    unused_on_some_ranks: bool = False
    """Some ranks may leave parameters out of their forward pass, so that DDP needs
    ``find_unused_parameters=True``."""
    sparse_gradients: bool = False
    """Some gradients are sparse tensors, which NCCL cannot all-reduce."""
    batch_coupled: str | None = None
    """None if an example's gradient depends neither on the other examples nor on its place in the
    batch. Otherwise the name of the cause by which a split batch differs with this model."""
    draws_random_numbers: bool = False
    """The forward pass draws random numbers in the order of the examples."""
    only_exact: bool = False
    """The model is used only in cases that are compared bit for bit. In other cases it would show
    nothing that the other models do not show."""
    scalar_parameters: bool = False
    """Some parameters have the shape (), of which no rank could be given a shard."""

    @property
    def can_be_sharded(self) -> bool:
        """True if FSDP can shard the parameters: all ranks use all of them, and none is a scalar or
        has a sparse gradient.
        """
        return not (self.unused_on_some_ranks or self.sparse_gradients or self.scalar_parameters)
