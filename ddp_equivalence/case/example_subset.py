"""Make a case that has only some examples of another case's big batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddp_equivalence.case.batch import BatchDims, take
from ddp_equivalence.case.build import build_whole_batch
from ddp_equivalence.case.case import BatchBuilder, Case, name_of
from ddp_equivalence.case.errors import BadCase

ExampleSubset = int | tuple[int, ...]
"""Examples of a big batch: a number n for the first n of them, or a tuple of their positions."""

ACCEPTED = "a number of examples from 1, or their positions as in 0,1,5"


@dataclass(frozen=True)
class SubsetBuilder:
    """A batch builder that calls another one and keeps only the examples at ``positions``.

    It can be pickled if the other builder can, so that every rank builds the same subset.
    """

    builder: BatchBuilder
    positions: tuple[int, ...]
    dims: BatchDims = field(default=None, hash=False)

    takes_some_examples = True
    """Whether it is clear where the examples lie was asked of the whole batch. Of some examples,
    any number may be as many as the entries of a list that every rank has whole."""

    def __call__(self, generator: torch.Generator) -> Any:
        return take(self.builder(generator), self.positions, self.dims)

    @property
    def __name__(self) -> str:
        return name_of(self.builder)


def with_examples(case: Case, subset: ExampleSubset) -> Case:
    """The case with only these examples in its big batch.

    Raises BadCase for a number or position beyond the batch, for a position given twice, and for
    positions in a batch of the catalogue, which is made in any size that is asked for.
    """
    positions = tuple(range(subset)) if isinstance(subset, int) else subset
    if not positions or min(positions) < 0 or len(set(positions)) < len(positions):
        raise BadCase("examples", subset, ACCEPTED)
    if case.batch is None:
        if not isinstance(subset, int):
            raise BadCase("examples", subset, "a number: the catalogue makes its own batch")
        return replace(case, examples=subset)
    size = examples_in(case)
    if max(positions) >= size:
        raise BadCase("examples", subset, f"at most the {size} examples of the batch")
    builder = SubsetBuilder(case.batch, positions, case.batch_dims)
    dealt = callable(case.batch_dims)
    return replace(case, batch=builder, examples=len(positions) if dealt else None)


def examples_in(case: Case) -> int:
    """The number of examples in the case's batch. Raises BadCase if the batch cannot be built."""
    return build_whole_batch(case)[1][0]


def parse(text: str) -> ExampleSubset:
    """Read ``"12"`` as the first twelve examples, and ``"0,1,5"`` or ``"7,"`` as positions.

    Raises BadCase for any other text.
    """
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadCase("examples", text, ACCEPTED)
    return tuple(map(int, parts)) if "," in text else int(text)


def as_text(subset: ExampleSubset) -> str:
    """The text that ``parse`` reads back as this subset."""
    if isinstance(subset, int):
        return str(subset)
    return ",".join(map(str, subset)) + ("," if len(subset) == 1 else "")
