"""Some examples of somebody's own big batch, without touching the code that builds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.case.build import build_batches
from ddp_equivalence.case.case import BatchBuilder, Case, name_of
from ddp_equivalence.case.errors import BadCase

Selection = int | tuple[int, ...]
"""The first so many examples, or their positions."""

RIGHT = "a number of examples from 1, or their positions as in 0,1,5"


@dataclass(frozen=True)
class Selected:
    """Builds the batch and keeps these examples, in this order. Travels to the ranks."""

    builder: BatchBuilder
    examples: tuple[int, ...]

    def __call__(self, generator: torch.Generator) -> Any:
        return take(self.builder(generator), self.examples)

    @property
    def __name__(self) -> str:
        return name_of(self.builder)


def with_examples(case: Case, selection: Selection) -> Case:
    """The case with these examples of its big batch only.

    Raises BadCase for a number or position beyond the batch, a position given twice, or positions
    in a batch of the catalogue, which is made in the size that is asked for.
    """
    positions = tuple(range(selection)) if isinstance(selection, int) else selection
    if not positions or min(positions) < 0 or len(set(positions)) < len(positions):
        raise BadCase("examples", selection, RIGHT)
    if case.batch is None:
        if not isinstance(selection, int):
            raise BadCase("examples", selection, "a number: the catalogue makes its own batch")
        return replace(case, examples=selection)
    has = size_of(case)
    if max(positions) >= has:
        raise BadCase("examples", selection, f"at most the {has} examples of the batch")
    return replace(case, batch=Selected(case.batch, positions))


def size_of(case: Case) -> int:
    """How many examples the case's batch has. Raises BadCase as building it does."""
    return count_examples(build_batches(case)[0])


def read(text: str) -> Selection:
    """``"12"`` is the first twelve, ``"0,1,5"`` or ``"7,"`` positions. Raises BadCase."""
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise BadCase("examples", text, RIGHT)
    return tuple(map(int, parts)) if "," in text else int(text)


def write(selection: Selection) -> str:
    """What ``read`` reads."""
    if isinstance(selection, int):
        return str(selection)
    return ",".join(map(str, selection)) + ("," if len(selection) == 1 else "")
