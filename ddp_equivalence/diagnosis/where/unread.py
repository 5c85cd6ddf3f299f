"""Finds examples that the loss of the case reads and that no rank of a step reads.

What a step gives to an operation that is differentiated counts as read, whatever became of its
shape: the rows that a step never takes out of the batch are missing there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.batch_tree import leaves_of, name_of_leaf
from ddp_equivalence.diagnosis.example_gradients import operations_of_the_loss
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.loss import behind
from ddp_equivalence.diagnosis.where.relations import KnownValues
from ddp_equivalence.measurement.calls import CodeLine, Operations, Value

MOST_EXAMPLES = 256
"""Larger batches are not looked through."""


@dataclass(frozen=True)
class Unread:
    """``examples``: those whose part of the leaf ``name`` of the batch no rank reads. ``lines``:
    those that take the other examples out of it.
    """

    name: str
    examples: tuple[int, ...]
    lines: tuple[CodeLine, ...]


def unread(view: View, ranks: Sequence[Operations]) -> tuple[Unread, ...]:
    """The leaves of the batch of which some examples are read and others are not.

    ``ranks``: what each of them ran. () if the loss of the case does not read all examples either.
    """
    setting, count = view.setting, view.setting.example_count
    if count > MOST_EXAMPLES:
        return ()
    eps = torch.finfo(setting.dtype).eps
    known = KnownValues((value for run in ranks for value, _ in _read_by(run)), (), eps)
    parts = [
        dict(leaves_of(take(setting.batch, [number], setting.case.batch_dims)))
        for number in range(count)
    ]
    missing: dict[str, list[int]] = {}
    for path, leaf in parts[0].items():
        answers = [_is_known(known, part.get(path)) for part in parts]
        if isinstance(leaf, Tensor) and set(answers) == {"yes", "no"}:
            missing[path] = [number for number, answer in enumerate(answers) if answer == "no"]
    if not missing:
        return ()
    of_loss = operations_of_the_loss(setting, [tuple(range(count))], view.time)
    in_loss = KnownValues((one for run in of_loss or () for one, _ in _read_by(run)), (), eps)
    if not all(_is_recognised(run, in_loss) for run in ranks):
        return ()  # examples may have been read in another form, such as without their padding
    return tuple(
        Unread(name_of_leaf(path), tuple(numbers), tuple(_lines(parts, path, ranks[0], eps)))
        for path, numbers in missing.items()
        if all(_is_known(in_loss, parts[number][path]) == "yes" for number in numbers)
    )


def _read_by(run: Operations) -> Iterator[tuple[Value, int | None]]:
    """The values without a gradient that operations with one were given, and who wrote each."""
    for operation in run.operations:
        if operation.in_backward or not operation.differentiable:
            continue
        for value, writer, required in zip(
            operation.given, operation.writers, operation.required, strict=True
        ):
            if value is not None and not required:
                yield run.values[value], writer


def _is_recognised(run: Operations, in_loss: KnownValues) -> bool:
    """True if all data that a rank reads are rows that the loss of the case reads, too."""
    differentiable = {n for n, one in enumerate(run.operations) if one.differentiable}
    return all(
        in_loss.has(value) == "yes"
        for value, writer in _read_by(run)
        if writer is None or differentiable.isdisjoint(behind(run, [writer]))
        if len(value.tensor.unique()) > 1 and (len(value.shape) != 1 or value.is_floating_point)
    )


def _is_known(known: KnownValues, part: object) -> str:
    if not isinstance(part, Tensor) or part.is_complex() or part.is_sparse or part.numel() < 2:
        return "unknown"
    return known.has(Value.of(part))


def _lines(
    parts: Sequence[dict[str, object]], path: str, run: Operations, eps: float
) -> Iterator[CodeLine]:
    """The line that took some of the rows of this leaf first."""
    leaves = [part[path] for part in parts]
    of_leaf = KnownValues((Value.of(one) for one in leaves if isinstance(one, Tensor)), (), eps)
    for operation in run.operations:
        given, made = (
            [run.values[one] for one in numbers if one is not None]
            for numbers in (operation.given, operation.returned)
        )
        sizes = [len(one.elements) for one in given if of_leaf.has(one) == "yes"]
        takes = any(len(one.elements) < max(sizes, default=0) for one in made)
        if takes and operation.line is not None and all(of_leaf.has(one) == "yes" for one in made):
            yield operation.line
            return
