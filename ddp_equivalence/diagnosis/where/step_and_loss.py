"""Finds the lines of a step that compute what the loss of the case does not compute.

A step that leaves wrong gradients on one rank with the whole batch as well has another loss than
the case. The first values that only the step has, made of values that both have, show where.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.diagnosis.divisors import OF_TARGETS
from ddp_equivalence.diagnosis.example_gradients import operations_of_the_loss
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, unexplained
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.cuts import Cut, cuts_of, not_meant
from ddp_equivalence.diagnosis.where.loss import behind, losses_of
from ddp_equivalence.diagnosis.where.relations import ROUNDING, Known, KnownValues, Rows, agree
from ddp_equivalence.diagnosis.where.two_logs import PACKING, partners
from ddp_equivalence.measurement.calls import CodeLine, Operation, Operations, Value
from ddp_equivalence.measurement.observation import Indices

MOST_PASSES = 8
"""The loss of the case is computed of the examples of so many backward passes."""

BYTES = 8
"""Of one element of a value."""

VIEWS = frozenset({"t", "transpose", "permute", "view", "detach", "alias", "_unsafe_view"})
"""Operations that write nothing, although later ones read the memory through them."""

NUMBERS = frozenset({"lift_fresh", "full", "scalar_tensor", "arange", "zeros", "ones"})
"""Operations that make tensors of numbers of Python."""

PLACES = frozenset({"sort", "argsort", "topk", "nonzero", "searchsorted", "randperm"})
"""Operations that say where something is in a tensor."""

FEWEST_WHOLE = 6
"""Fewer whole numbers that are taken out of a tensor tell nothing."""

COPYING = VIEWS | {
    "slice",
    "select",
    "split",
    "unbind",
    "index",
    "clone",
    "copy",
    "copy_",
    "_to_copy",
}
"""Operations that compute nothing: they return elements that they were given."""

MOST_FOUND = 4
"""If more lines compute something else, the step says the loss in another way."""


@dataclass(frozen=True)
class Unlike:
    """``operation``, of this line: its inputs are among the values of the loss of the case, and its
    result is not. ``value``: the result. ``in_loss``: the result that the same operation of the
    loss of the case has instead; None if there is no such operation. ``made_at``: the other lines
    that made what it was given. ``joined``: two different examples whose rows it joins; None if it
    joins none. ``moved_at``: the lines that put rows into another order.
    """

    operation: Operation
    line: CodeLine
    value: Value
    in_loss: Value | None
    made_at: tuple[CodeLine, ...]
    joined: tuple[int, int] | None = None
    moved_at: tuple[CodeLine, ...] = ()


@dataclass(frozen=True)
class StepAndLoss:
    """A step that is wrong on one rank, beside the loss of the case. ``unlike``: where its forward
    passes leave this loss. ``cuts``: where gradients end that go on in the loss. ``changed``: the
    first operations in or after backward passes that make other gradients, of what the loss has.
    ``begins_right``: where nothing of this was found, the backward passes of all ranks were seen to
    begin at the right loss.
    """

    unlike: tuple[Unlike, ...] = ()
    cuts: tuple[Cut, ...] = ()
    changed: tuple[Unlike, ...] = ()
    begins_right: bool = False


def compared_with_the_loss(view: View, step: Operations, parts: Sequence[Indices]) -> StepAndLoss:
    """Where a step leaves the loss of the case, in the order in which it does.

    ``step``: what one rank ran with the whole batch. ``parts``: the examples of its backward
    passes, if it has several and they are known. Nothing is said if too many lines do.
    """
    parts = parts if len(parts) <= MOST_PASSES and _has_read(view, step, parts) else ()
    passes = _passes(step)
    loss = _Loss.of(view, parts, {len(parts) + 1, passes, view.world_size})
    if loss is None:
        return StepAndLoss()
    scalars_count = passes <= 1 or bool(parts)
    cuts = not_meant(cuts_of(step), loss.recorded, loss.eps)
    unlike = loss.unlike([step], scalars_count=scalars_count)
    # The line that calls backward stands for all that autograd does, and tells nothing.
    calls = {one.line for one in view.observed.calls.backwards}
    changed: Sequence[Unlike] = ()
    if not unlike and not cuts:
        changed = loss.unlike([step], backward=True, scalars_count=scalars_count)
    return StepAndLoss(unlike, cuts, tuple(one for one in changed if one.line not in calls)[:1])


def ranks_compared_with_the_loss(view: View, ranks: Sequence[Operations]) -> StepAndLoss:
    """Where the ranks leave the loss of the case, in a step that does not run on one rank.

    Each rank may have any examples, any part of a layer or a sequence, or a part of a sum over a
    group of ranks. Nothing is said if too many lines compute something else.
    """
    taken = tuple(dict.fromkeys(part for run in ranks for part in _parts_taken(view, run)))
    counts = {*_group_sizes(len(ranks)), *map(_passes, ranks)}
    loss = _Loss.of(view, taken, counts) if len(taken) <= MOST_PASSES else None
    if loss is None:
        return StepAndLoss()
    unlike = loss.unlike(ranks)
    changed = () if unlike else loss.unlike(ranks, backward=True)[:1]
    is_open = not unlike and not changed
    begins_right = is_open and all(one.begins_right for one in loss.searches(ranks))
    return StepAndLoss(unlike, (), changed, begins_right)


@dataclass(frozen=True)
class _Loss:
    """The loss of the case. ``recorded``: as it computes the big batch, and parts of it.
    ``multiples``: by these numbers a step may divide or multiply what the loss has.
    """

    view: View
    recorded: Sequence[Operations]
    multiples: Collection[float]
    rows: Rows
    eps: float

    @classmethod
    def of(cls, view: View, parts: Sequence[Indices], counts: Collection[int]) -> _Loss | None:
        """``counts``: numbers of passes and of ranks. None if too much had to be recorded."""
        whole = tuple(range(view.setting.example_count))
        recorded = operations_of_the_loss(view.setting, [whole, *parts], view.time)
        if recorded is None:
            return None
        multiples = {float(one) for one in {*counts, *map(len, (whole, *parts))} if one}
        multiples |= _counts(recorded)
        multiples |= {1 / one for one in multiples}
        rows = rows_of_the_loss(view, recorded, [whole, *parts])
        return cls(view, recorded, multiples, rows, torch.finfo(view.setting.dtype).eps)

    def unlike(
        self, runs: Sequence[Operations], *, backward: bool = False, scalars_count: bool = True
    ) -> tuple[Unlike, ...]:
        """The lines of these ranks that compute something else, first those that join different
        examples; () if there are too many. ``backward``: look at backward passes instead of the
        others. ``scalars_count``: single numbers must be those of the loss, too.
        """
        found: dict[CodeLine, Unlike] = {}
        for search in self.searches(runs, backward=backward, scalars_count=scalars_count):
            for one in search.found():
                if one.line not in found or (one.joined and not found[one.line].joined):
                    found[one.line] = one
        first = sorted(found.values(), key=lambda one: one.joined is None)
        # A loss differs because of what it is made of, if that differs.
        others = [one for one in first if not one.operation.differentiable or one.value.shape]
        return tuple(others or first) if len(first) <= MOST_FOUND else ()

    def searches(
        self, runs: Sequence[Operations], *, backward: bool = False, scalars_count: bool = True
    ) -> Iterator[_Search]:
        """A search for each rank, as ``unlike`` makes it."""
        known = KnownValues(_known(self.view, self.recorded, backward), self.multiples, self.eps)
        kind = _InGradients if backward else _Search
        for rank, run in enumerate(runs):
            sums = _Sums(runs, rank, known)
            wrong = self._wrong(run) if backward else frozenset()
            yield kind(run, self.recorded, sums, self.rows, wrong, scalars_count=scalars_count)

    def _wrong(self, run: Operations) -> frozenset[int]:
        """The numbers of the gradients that a run has left, where they are not the big batch's."""
        left = {name: run.values[number].tensor.flatten() for name, number in run.left.items()}
        places, limit = self.view.parameters.places, max(NEGLIGIBLE, ROUNDING * self.eps)
        return frozenset(
            run.left[name]
            for name, held in left.items()
            if name in places
            and len(right := self.view.expected[places[name]]) == len(held)
            and unexplained(right, held) > limit
        )


def _group_sizes(world_size: int) -> list[int]:
    return [size for size in range(2, world_size + 1) if world_size % size == 0]


def _parts_taken(view: View, run: Operations) -> Iterator[Indices]:
    """The examples that a rank has taken out of the batch together, where fewer than all."""
    for whole in (one.tensor for one in _of_batch(view.setting.batch)):
        if not whole.ndim or len(whole) != view.setting.example_count:
            continue
        place = {row.numpy().tobytes(): number for number, row in enumerate(whole)}
        if len(place) != len(whole):
            continue  # equal rows do not tell which of them was taken
        for value in run.values:
            if value.shape[1:] == whole.shape[1:] and value.shape:
                rows = [place.get(row.numpy().tobytes()) for row in value.tensor]
                if None not in rows and 0 < len(rows) < len(whole):
                    yield tuple(one for one in rows if one is not None)


class _Sums:
    """Recognises the values of one rank among those that are known, and those that the ranks of a
    group add up to.
    """

    def __init__(self, ranks: Sequence[Operations], rank: int, known: KnownValues) -> None:
        self._ranks, self._rank, self._known = ranks, rank, known
        self._partners = list(partners(ranks[rank], ranks))
        self._made: dict[Value, list[tuple[int, int]]] = {}
        run = ranks[rank]
        for number, operation in enumerate(run.operations):
            for place, value in enumerate(operation.returned):
                if value is not None:
                    self._made.setdefault(run.values[value], []).append((number, place))
        world = range(len(ranks))
        self._groups = {
            tuple(one for one in world if of(one, size) == of(rank, size))
            for size in _group_sizes(len(ranks))
            for of in (int.__floordiv__, lambda one, size: one % (len(ranks) // size))
        }

    def has(self, value: Value) -> Known:
        """Whether this value, or a sum of which it is a part, is one of those that are known."""
        found = self._known.has(value)
        if found != "no" or not value.is_floating_point:
            return found
        for number, place in self._made.get(value, ()):
            for group in self._groups:
                total = self._total(group, number, place)
                if total is not None and self._known.has(total) == "yes":
                    return "yes"
        return "no"

    def _total(self, group: Sequence[int], number: int, place: int) -> Value | None:
        """What the results of an operation on the ranks of a group add up to."""
        each = []
        for rank in group:
            partner = self._partners[rank].get(number)
            run = self._ranks[rank]
            value = None if partner is None else run.operations[partner].returned[place]
            if value is None:
                return None
            each.append(run.values[value])
        if len({one.shape for one in each}) > 1:
            return None
        total = torch.stack([one.tensor for one in each]).sum(0)
        return replace(Value.of(total), dtype=each[0].dtype)


def rows_of_the_loss(
    view: View, recorded: Sequence[Operations] = (), parts: Sequence[Indices] = ()
) -> Rows:
    """The rows of the big batch, and of what the loss of the case makes of it and its parts.

    No row is known if that loss itself joins different examples, as one of pairs or of neighbours
    does. ``recorded``: this loss of these parts, if it has been recorded already.
    """
    setting, whole = view.setting, tuple(range(view.setting.example_count))
    parts, orders = parts or [whole], [whole[::-1]]
    found = operations_of_the_loss(setting, [*orders, *(() if recorded else parts)], view.time)
    if found is None:
        return Rows()
    each = [
        _in_order(view, run, part) for run, part in zip(recorded or found[1:], parts, strict=True)
    ]
    turned = _in_order(view, found[0], orders[0])
    eps = torch.finfo(setting.dtype).eps
    rows = Rows(each[0], turned, zip(each, parts, strict=True), eps)
    run = (recorded or found[1:])[0]
    return Rows() if any(joined(rows, run, one) for one in run.operations) else rows


def joined(rows: Rows, run: Operations, operation: Operation) -> tuple[int, int] | None:
    """Two different examples whose rows the operation of this run joins, as a sum or a product
    does; None if it joins none, or only puts values beside each other.
    """
    if operation.name in PACKING:
        return None
    return rows.joined(run.values[one] for one in operation.given if one is not None)


def _of_batch(batch: Any) -> list[Value]:
    return [Value.of(one) for one in tensors_of(batch) if not (one.is_sparse or one.is_complex())]


def _in_order(view: View, run: Operations, part: Indices) -> list[Value | None]:
    """What is taken of the batch, and all that operations return, in their order."""
    batch = take(view.setting.batch, part, view.setting.case.batch_dims)
    returned = (one for operation in run.operations for one in operation.returned)
    values = (None if one is None else run.values[one] for one in returned)
    return [*_of_batch(batch), *values]


def _known(view: View, recorded: Sequence[Operations], backward: bool) -> Iterator[Value]:
    """The values of the big batch, and those that the loss of the case makes of it: in forward
    passes, or in all.
    """
    yield from _of_batch(view.setting.batch)
    for run in recorded:
        forward = (one for one in run.operations if not one.in_backward)
        numbers = dict.fromkeys(n for one in forward for n in (*one.given, *one.returned))
        yield from run.values if backward else (run.values[n] for n in numbers if n is not None)


def _has_read(view: View, step: Operations, parts: Sequence[Indices]) -> bool:
    """True if the step has taken each of these parts out of the batch."""
    held = {(value.shape, value.elements) for value in step.values}
    for part in parts:
        batch = take(view.setting.batch, part, view.setting.case.batch_dims)
        taken = [Value.of(tensor) for tensor in tensors_of(batch) if tensor.numel() > 1]
        if not any((one.shape, one.elements) in held for one in taken):
            return False
    return True


def _counts(recorded: Sequence[Operations]) -> set[float]:
    """The numbers that the loss of the case may divide a sum by: the whole numbers that it counts,
    how many rows or elements it makes a single number of, and the weights of a cross-entropy.
    """
    found, weights = set[float](), set[float]()
    for one in recorded:
        for operation in one.operations:
            returned = [one.values[number] for number in operation.returned if number is not None]
            singles = [value for value in returned if len(value.elements) == BYTES]
            found.update(float(value.tensor) for value in singles)
            if operation.name in OF_TARGETS:
                weights.update(float(value.tensor) for value in singles[1:])
            shapes = [one.values[number].shape for number in operation.given if number is not None]
            for shape in filter(None, shapes if singles else ()):
                found |= {float(shape[0]), float(math.prod(shape))}
    return {one for one in found if one > 1 and one.is_integer()} | (weights - {0.0})


def _is_new(operation: Operation) -> bool:
    """True if an operation makes a tensor of nothing but a shape or numbers of Python, or places
    in a tensor, which tell nothing before something is taken from there.
    """
    return operation.name in (*NUMBERS, *PLACES) or operation.name.endswith("_like")


def _passes(step: Operations) -> int:
    """How many backward passes the step ran: blocks of operations inside one."""
    inside = [one.in_backward for one in step.operations]
    return sum(here and not before for before, here in zip([False, *inside], inside, strict=False))


class _Search:
    def __init__(
        self,
        step: Operations,
        recorded: Sequence[Operations],
        known: _Sums,
        rows: Rows,
        wrong: frozenset[int],
        *,
        scalars_count: bool,
    ) -> None:
        self._step = step
        self._wrong = wrong
        self._rows = rows
        self._operations = step.operations
        self._recorded = recorded
        self._known = known
        self._scalars_count = scalars_count
        self._cache: dict[int, Known] = {}
        self._readers: dict[int, list[int]] = {}
        for number, operation in enumerate(self._operations):
            for writer in operation.after:
                self._readers.setdefault(writer, []).append(number)

    def found(self) -> Iterator[Unlike]:
        """The operations with which the step leaves the loss of the case."""
        for number in sorted(self._lasting):
            operation = self._operations[number]
            if self._is_new(number):
                continue
            new = [
                (given, writer)
                for given, writer in zip(operation.given, operation.writers, strict=True)
                if given is not None and self._of_value(given) == "no"
                if writer is not None and not self._is_new(writer)
            ]
            if not new:
                yield from self._unlike(number, operation.returned)
            for given, writer in new:
                if self._result(writer) != "no":  # it has written to a part of this
                    yield from self._unlike(writer, (given,))

    @cached_property
    def _forward(self) -> set[int]:
        """The operations before the last backward pass that are made of no gradient."""
        last = max((n for n, one in enumerate(self._operations) if one.in_backward), default=0)
        found: set[int] = set()
        views: set[int] = set()  # inside backward passes, of weights that a later pass reads
        for number, operation in enumerate(self._operations[:last]):
            after = () if self._is_new(number) else operation.after
            if any(one not in found and one not in views for one in after):
                continue
            if not operation.in_backward:
                found.add(number)
            elif operation.name in VIEWS:
                views.add(number)
        return found

    @cached_property
    def begins_right(self) -> bool:
        """True if all backward passes begin at a loss that is that of the case."""
        losses = [*losses_of(self._step)]
        return bool(losses) and all(
            one is not None and self._result(one) == "yes" for one in losses
        )

    @cached_property
    def _lasting(self) -> set[int]:
        """The operations with unknown results that lead to what is differentiated, and of which
        nothing that is known is made on the way there. Where backward passes begin at losses that
        are known, what they read besides is not looked at.
        """
        found: set[int] = set()
        open_ones: set[int] = set()
        for number in sorted(self._forward, reverse=True):
            readers = self._readers.get(number, ())
            after = [one for one in readers if one in self._forward and not self._is_new(one)]
            result = self._result(number)
            ends = not after and (
                self._operations[number].differentiable
                or (
                    not self.begins_right
                    and any(self._operations[one].in_backward for one in readers)
                )
            )
            if any(one in open_ones for one in after) or (ends and result != "yes"):
                if result != "yes":
                    open_ones.add(number)
                if result == "no":
                    found.add(number)
        return found

    def _is_new(self, number: int) -> bool:
        return number in self._new

    @cached_property
    def _new(self) -> set[int]:
        """The operations that make something of nothing, or places of nothing but places."""
        found: set[int] = set()
        for number, operation in enumerate(self._operations):
            made = [self._step.values[one] for one in operation.returned if one is not None]
            are_places = bool(operation.after) and operation.after <= found
            are_places &= not any(one.is_floating_point or one.dtype == "bool" for one in made)
            if _is_new(operation) or are_places:
                found.add(number)
        return found

    def _result(self, number: int) -> Known:
        each = [self._of_value(one) for one in self._operations[number].returned if one is not None]
        if "no" in each:
            return "no"
        return "yes" if each and all(one == "yes" for one in each) else "unknown"

    def _of_value(self, number: int) -> Known:
        if number not in self._cache:
            value = self._step.values[number]
            known = "no" if number in self._wrong else self._known.has(value)
            is_scalar = len(value.elements) == BYTES
            is_copy = number in self._copied and len(value.elements) < FEWEST_WHOLE * BYTES
            if known == "no" and (is_copy or (is_scalar and not self._scalars_count)):
                known = "unknown"
            self._cache[number] = known  # what is packed alone is made of itself
            parts = self._packed.get(number, ())
            if known == "no" and parts and all(self._of_value(one) == "yes" for one in parts):
                known = "yes"
            self._cache[number] = known
        return self._cache[number]

    @cached_property
    def _packed(self) -> dict[int, tuple[int, ...]]:
        """The values that are nothing but other values beside each other, with these."""
        return {
            made: tuple(given for given in one.given if given is not None)
            for one in self._operations
            if one.name in PACKING
            for made in one.returned
            if made is not None and made not in self._wrong
        }

    @cached_property
    def _copied(self) -> set[int]:
        """The whole numbers that were taken out of something."""
        made = (n for one in self._operations if one.name in COPYING for n in one.returned)
        return {n for n in made if n is not None and not self._step.values[n].is_floating_point}

    def _unlike(self, number: int, made: Sequence[int | None]) -> Iterator[Unlike]:
        """The first of the values that an operation has made, if the loss of the case has not."""
        operation = self._operations[number]
        line = operation.line
        if line is None:
            return
        for one in made:
            if one is not None and self._of_value(one) == "no":
                value = self._step.values[one]
                pair = joined(self._rows, self._step, operation)
                moved = dict.fromkeys(self._rearranged_at(number) if pair else ())
                lines = dict.fromkeys(self._made_at(number, line))
                in_loss = self._in_loss(operation, value)
                yield Unlike(operation, line, value, in_loss, tuple(lines), pair, tuple(moved))
                return

    def _rearranged_at(self, number: int) -> Iterator[CodeLine]:
        """The lines that put rows into another order, the first one first."""
        for one in sorted(behind(self._step, [number])):
            operation = self._operations[one]
            given, made = (
                [self._rows.of(self._step.values[n]) for n in numbers if n is not None]
                for numbers in (operation.given, operation.returned)
            )
            moved = operation.name not in PLACES and any(
                g and m and not agree(g, m) for g in given for m in made
            )
            if moved and operation.line is not None:
                yield operation.line

    def _in_loss(self, operation: Operation, value: Value) -> Value | None:
        """The same result, with the same shape, of the only operation of the loss with this name
        that the step has not got.
        """
        own, values = set(self._step.values), self._step.values
        is_it = (one is not None and values[one] == value for one in operation.returned)
        place = next((number for number, same in enumerate(is_it) if same), 0)
        found = {
            recorded.values[number]
            for recorded in self._recorded
            for one in recorded.operations
            if one.name == operation.name and one.in_backward == operation.in_backward
            for number in one.returned[place : place + 1]
            if number is not None and recorded.values[number].shape == value.shape
        } - own
        return found.pop() if len(found) == 1 else None

    def _made_at(self, number: int, line: CodeLine | None) -> Iterator[CodeLine]:
        """The lines that made what an operation was given, other than its own; those that made
        what the loss of the case has come last.
        """
        known: list[CodeLine] = []
        open_ones, seen = list(self._operations[number].writers), set[int]()
        while open_ones:
            writer = open_ones.pop(0)
            if writer is None or writer in seen:
                continue
            seen.add(writer)
            operation = self._operations[writer]
            if operation.line in (line, None) or operation.in_backward:
                open_ones.extend(operation.writers)
            elif self._result(writer) == "yes":
                known.append(operation.line)
            else:
                yield operation.line
        yield from known


class _InGradients(_Search):
    """Looks through backward passes, and what comes after them."""

    def found(self) -> Iterator[Unlike]:
        """The first operations that make other gradients of what the loss of the case has as well.

        What leads to no gradient that the step leaves does not count.
        """
        leading = behind(self._step, self._step.results.values())
        began = next((n for n, one in enumerate(self._operations) if one.in_backward), None)
        for number, operation in enumerate(self._operations):
            if began is None or number < began or number not in leading or self._is_new(number):
                continue
            given = [
                self._of_value(value)
                for value, writer in zip(operation.given, operation.writers, strict=True)
                if value is not None and not (writer is not None and self._is_new(writer))
            ]
            if "no" not in given and self._result(number) == "no":
                yield from self._unlike(number, operation.returned)
