"""The random numbers that the ranks drew, as rows of the big batch, for any examples of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.draws import Draw
from ddp_equivalence.measurement.observation import Indices

ORDERS = ("randperm", "numpy.permutation")
"""Draws whose values are places of examples. They stay with the examples that they are about."""

NOBODY = -1
"""The owner of an example that no rank has read; its numbers are those of the reference."""


@dataclass(frozen=True)
class Draws:
    """Equal draws that followed each other at one line.

    ``values``: shape (draws, ...), the shape of one draw behind the first dimension.
    """

    name: str
    values: Tensor
    line: CodeLine | None


def joined_draws(draws: Sequence[Draw]) -> list[Draws] | None:
    """The draws, those that followed each other at one line together; None if one has no value."""
    found = []
    for (name, shape, line), group in groupby(
        draws, lambda one: (one.name, None if one.value is None else one.value.shape, one.line)
    ):
        if shape is None:
            return None
        found.append(
            Draws(name, torch.stack([one.value for one in group if one.value is not None]), line)
        )
    return found


@dataclass(frozen=True)
class Part:
    """The examples of one backward pass of a rank, in their order, and what was drawn for it."""

    rank: int
    number: int
    examples: Indices
    draws: tuple[Draws, ...]


@dataclass(frozen=True)
class DrawTable:
    """``parts``: all backward passes of all ranks. ``axes``: for each draw, the dimension of its
    values along which examples stand; None if it is drawn once for all examples of a part.
    ``rows``: for each draw with such a dimension, shape (examples, numbers of one example, ...).
    ``owners``: example -> the index of the part that read it. ``reference``: what the big batch
    draws by itself.
    """

    parts: tuple[Part, ...]
    axes: tuple[int | None, ...]
    rows: tuple[Tensor | None, ...]
    owners: tuple[int, ...]
    reference: tuple[Draws, ...]

    @property
    def differs_by_part(self) -> bool:
        """True if a number that is drawn for all examples of a part is another in another part."""
        owners = set(self.owners)
        return any(
            axis is None
            and any(
                not torch.equal(self._of_owner(min(owners), number).values, other.values)
                for other in (self._of_owner(owner, number) for owner in owners)
            )
            for number, axis in enumerate(self.axes)
        )

    def groups(self, examples: Indices) -> list[tuple[int, Indices]]:
        """The examples by the part that read them, where that makes a difference."""
        if not self.differs_by_part:
            return [(min(self.owners), examples)]
        owners = dict.fromkeys(self.owners[index] for index in examples)
        return [
            (owner, tuple(index for index in examples if self.owners[index] == owner))
            for owner in owners
        ] or [(min(self.owners), examples)]

    def draws_for(self, examples: Indices, owner: int) -> list[Draw]:
        """What is drawn for these examples, with the numbers of this part where examples share
        them.
        """
        found = []
        for number, (axis, rows) in enumerate(zip(self.axes, self.rows, strict=True)):
            own = self._of_owner(owner, number)
            values = own.values
            if axis is not None and rows is not None:
                values = _along(rows[list(examples)], axis)
                if own.name in ORDERS:
                    values = _places_among(values, examples)
            found += [Draw(own.name, one, own.line) for one in values]
        return found

    def parts_of(self, examples: Indices) -> list[Part]:
        """The backward passes that read exactly these examples."""
        return [part for part in self.parts if part.examples == examples]

    def of_part(self, part: Part) -> list[Draw]:
        """What was drawn for a part, as it was drawn."""
        return [Draw(one.name, value, one.line) for one in part.draws for value in one.values]

    def _of_owner(self, owner: int, number: int) -> Draws:
        return (self.reference if owner == NOBODY else self.parts[owner].draws)[number]


def table_of(
    parts: Sequence[Part], reference: Sequence[Draws], axes: Sequence[int | None], examples: int
) -> DrawTable | None:
    """The draws of the parts as rows; None if they are not those of their examples.

    ``reference``: what the big batch draws, which has so many ``examples``.
    """
    names = [one.name for one in reference]
    if any([one.name for one in part.draws] != names for part in parts):
        return None
    owners = [NOBODY] * examples
    for index, part in enumerate(parts):
        for example in part.examples:
            if owners[example] == NOBODY:
                owners[example] = index
    all_rows = []
    for number, (whole, axis) in enumerate(zip(reference, axes, strict=True)):
        own = [part.draws[number].values for part in parts]
        if not all(
            _fits(values, len(part.examples), whole.values, examples, axis)
            for values, part in zip(own, parts, strict=True)
        ):
            return None
        all_rows.append(None if axis is None else _rows(whole, number, axis, parts, owners))
    return DrawTable(tuple(parts), tuple(axes), tuple(all_rows), tuple(owners), tuple(reference))


def _fits(part: Tensor, examples: int, whole: Tensor, all_examples: int, axis: int | None) -> bool:
    """True if the part has the shape of the whole, but for the number of examples."""
    shape = list(whole.shape)
    if axis is not None:
        shape[axis] = shape[axis] // all_examples * examples
    return list(part.shape) == shape


def _rows(
    whole: Draws, number: int, axis: int, parts: Sequence[Part], owners: Sequence[int]
) -> Tensor:
    rows = _by_example(whole.values, axis, len(owners)).clone()
    if whole.name in ORDERS:
        rows = rows.long()
    for index, part in enumerate(parts):
        values = part.draws[number].values
        own = _by_example(values, axis, len(part.examples)) if part.examples else rows
        if whole.name in ORDERS and part.examples:
            own = torch.tensor(part.examples)[own.long()]
        for place, example in enumerate(part.examples):
            if owners[example] == index:
                rows[example] = own[place].to(rows.dtype)
    return rows


def _by_example(values: Tensor, axis: int, examples: int) -> Tensor:
    """Shape (examples, numbers of one example, ...)."""
    first = values.movedim(axis, 0)
    numbers = len(first) // examples
    return first.reshape(examples, numbers, *first.shape[1:])


def _along(rows: Tensor, axis: int) -> Tensor:
    """The reverse of ``_by_example``."""
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:]).movedim(0, axis)


def _places_among(values: Tensor, examples: Indices) -> Tensor:
    """Examples by number -> their places among these; others take the places that are left."""
    places = {example: place for place, example in enumerate(examples)}
    found = [places.get(int(value)) for value in values.flatten()]
    left = iter(sorted(set(range(len(examples))) - set(found)))
    filled = [next(left, 0) if place is None else place for place in found]
    return torch.tensor(filled, dtype=values.dtype).reshape(values.shape)
