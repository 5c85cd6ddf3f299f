"""Compares the operations of a step with those of the same step on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain

import torch

from ddp_equivalence.diagnosis.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, unexplained
from ddp_equivalence.diagnosis.view import View, lines_of_the_big_batch
from ddp_equivalence.diagnosis.where.cuts import (
    Cut,
    at_collectives,
    called,
    independent_of_the_loss,
    only_of_ranks,
)
from ddp_equivalence.diagnosis.where.loss import (
    READ_BY_PYTHON,
    Scaling,
    behind,
    is_left_by_backward,
    loss_on_one_rank,
    scalings_of_loss,
)
from ddp_equivalence.diagnosis.where.names import Names
from ddp_equivalence.diagnosis.where.relations import (
    RELATED,
    Relation,
    Rows,
    Selection,
    Sharing,
    found_in,
)
from ddp_equivalence.diagnosis.where.step_and_loss import (
    VIEWS,
    StepAndLoss,
    compared_with_the_loss,
    joined,
    ranks_compared_with_the_loss,
    rows_of_the_loss,
)
from ddp_equivalence.diagnosis.where.two_logs import PACKING, TwoLogs
from ddp_equivalence.diagnosis.where.unread import Unread, unread
from ddp_equivalence.measurement.calls import CodeLine, Operation, Operations, Value
from ddp_equivalence.measurement.gradient_watch import factor_between
from ddp_equivalence.measurement.measure import (
    OneRank,
    operations_beside_one_rank,
    operations_on_one_rank,
    operations_on_ranks,
)
from ddp_equivalence.measurement.observation import Indices
from ddp_equivalence.measurement.operation_log import BETWEEN_TWO, UNWRITTEN
from ddp_equivalence.measurement.request import Request

MUCH_LESS = 0.1
"""One rank is right if it is off by at most this share of what the ranks are off."""

TAKING_PARTS = ("split", "split_with_sizes", "unbind", "slice", "select", "clone", "cat", *VIEWS)
"""Operations that take or join parts, of which one rank has others, and that make no values."""

# Compares a step with the same step on one rank, where a difference has no known cause.

COARSEST = 1e-4
"""In a precision with a larger eps, rounding alone makes other values."""

MOST_SECONDS = 10.0
"""The seconds that the step gets on one rank, and again on its own ranks."""


@dataclass(frozen=True)
class BesideOneRank:
    """``is_right_alone``: the step leaves the gradients of the big batch on one rank; None if it
    does not run there, and the ranks were compared with the loss of the case.

    ``factor_alone``: it leaves them times this number there; None if it leaves others.
    ``rounds_in``: up to the rounding of this dtype; "" if they are nearer.
    ``divergences``: where the ranks part from one rank that is right. ``cuts``: where gradients end
    on ranks, and not on one rank; if that is wrong, only at collectives. ``past_autograd``: the
    collectives on the way to wrong gradients of which autograd knows nothing. ``loss``: where one
    rank that is wrong leaves the loss of the case. ``scalings``: the numbers by which its loss was
    scaled, and ``scalings_of_ranks`` those on every rank. ``loss_alone``: at which its backward
    began; None if it is not known.
    ``is_left_by_backward``: what it leaves is what backward has computed. ``ignoring``: the
    parameters whose gradients do not depend on how the loss is scaled, on one rank or on others.
    ``unread``: the examples that no rank reads. ``lines_of_case``: file -> the lines that compute
    the big batch as well. ``left_unreduced``: the calls of backward after which each rank has left
    its own gradients as they were. ``at_each_step``: all of this is about the gradients with which
    an optimizer steps. ``names``: what names of the user's held on the ranks, and on one rank.
    """

    is_right_alone: bool | None
    factor_alone: float | None = None
    rounds_in: str = ""
    divergences: tuple[Divergence, ...] = ()
    cuts: tuple[Cut, ...] = ()
    past_autograd: tuple[Operation, ...] = ()
    loss: StepAndLoss = field(default_factory=StepAndLoss)
    scalings: tuple[Scaling, ...] = ()
    scalings_of_ranks: tuple[tuple[Scaling, ...], ...] = ()
    loss_alone: float | None = None
    is_left_by_backward: bool = False
    ignoring: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()
    lines_of_case: Mapping[str, set[int]] = field(default_factory=dict)
    left_unreduced: tuple[CodeLine, ...] = ()
    at_each_step: bool = False
    names: Names = field(default_factory=Names)

    def is_right(self, line: CodeLine) -> bool:
        """True for a line of the case's own: it computes the big batch, which is right."""
        return line.number in self.lines_of_case.get(line.file, ())


def beside_one_rank(view: View, request: Request) -> BesideOneRank | None:
    """Run the step on one rank as well; None if this shows nothing."""
    found = unless_it_fails(lambda: _beside_one_rank(view, request), lambda why: None)
    if found is not None and request.compare == "update" and not found.is_right_alone:
        found = replace(found, is_right_alone=None)  # it may have clipped or cleared what it left
    if found is not None:
        found = replace(found, at_each_step=request.at_each_step)
    if found is None or not (found.divergences or found.loss.unlike):
        return found
    asked = request.case, request.compare, request.training, request.steps
    of_case = unless_it_fails(lambda: lines_of_the_big_batch(*asked), lambda why: {})
    return replace(found, lines_of_case=of_case)


def _beside_one_rank(view: View, request: Request) -> BesideOneRank | None:
    if torch.finfo(view.setting.dtype).eps > COARSEST or not _can_be_asked(view, request):
        return None
    rows = _rows(view)
    order = _order(view, rows) if request.step_count == 1 else _order_of_steps(view, rows, request)
    deadline = min(request.deadline, MOST_SECONDS)
    runs = operations_beside_one_rank(request, deadline, order or ())
    if runs is None:
        by_rank = operations_on_ranks(request, deadline)
        if by_rank is None or not _is_predicted(view, request):
            return None
        of_ranks = [by_rank[rank] for rank in sorted(by_rank)]
        return BesideOneRank(None, loss=ranks_compared_with_the_loss(view, of_ranks))
    factor = _factor(view, runs.alone)
    ignoring = [independent_of_the_loss(run) for run in (runs.alone, *runs.by_rank.values())]
    found = _compared(view, runs, rows, order, factor)
    if found is None:
        return None
    if not _is_predicted(view, request) and not found.is_right_alone:
        return BesideOneRank(False)
    of_ranks = [runs.by_rank[rank] for rank in sorted(runs.by_rank)]
    found = replace(found, ignoring=max(ignoring, key=len))
    return (
        found if not _is_predicted(view, request) else replace(found, unread=unread(view, of_ranks))
    )


def _compared(
    view: View,
    runs: OneRank,
    rows: list[tuple[int, ...]] | None,
    order: tuple[int, ...] | None,
    factor: float | None,
) -> BesideOneRank | None:
    if factor is None or abs(factor - 1) > _tolerance(view, runs.alone):
        # With other random numbers it may be right all the same.
        if any(one.draws and not _is_seed(runs.alone, one) for one in runs.alone.operations):
            return None
        return BesideOneRank(
            is_right_alone=False,
            factor_alone=factor,
            cuts=at_collectives([runs.by_rank[rank] for rank in sorted(runs.by_rank)]),
            loss=compared_with_the_loss(view, runs.alone, _parts(view, rows)),
            scalings=tuple(scalings_of_loss(runs.alone)),
            scalings_of_ranks=tuple(map(tuple, map(scalings_of_loss, runs.by_rank.values()))),
            loss_alone=loss_on_one_rank(runs.alone),
            is_left_by_backward=is_left_by_backward(runs.alone),
        )
    if view.world_size == 1:
        return None  # the step has left something else this time
    least = _least_precise(view, runs.alone)
    is_rounded = _factor(view, runs.alone, NEGLIGIBLE) is None
    rounds_in = str(least).removeprefix("torch.") if is_rounded else ""
    cuts = only_of_ranks([runs.by_rank[rank] for rank in sorted(runs.by_rank)], runs.alone)
    if rows is None and order is not None and _takes_parts(view):
        rows = [tuple(range(view.setting.example_count))] * view.world_size
    if rows is None or order is None:
        return BesideOneRank(is_right_alone=True, factor_alone=1.0, rounds_in=rounds_in, cuts=cuts)
    place = {example: number for number, example in enumerate(order)}
    sharing = Sharing(
        tuple(tuple(place.get(one, one) for one in of_rank) for of_rank in rows),
        view.setting.example_count,
        torch.finfo(_least_precise(view, runs.alone)).eps,
        float(view.expected.abs().max()),
    )
    logs = logs_of(runs, sharing)
    found = divergences(logs, lambda: rows_of_the_loss(view))
    beside = BesideOneRank(True, 1.0, rounds_in, found, cuts, past_autograd(logs))
    left = tuple(dict.fromkeys(left_unreduced(logs)))
    return replace(beside, left_unreduced=left, names=Names.of(runs))


def _is_seed(run: Operations, operation: Operation) -> bool:
    """True if an operation drew a single whole number, as a loader does for its workers."""
    drawn = [None if one is None else run.values[one] for one in operation.returned]
    return all(one and one.shape == () and not one.is_floating_point for one in drawn)


def logs_of(runs: OneRank, sharing: Sharing) -> TwoLogs:
    """The logs of both runs, with the parts that the ranks were seen to take of anything."""
    logs = TwoLogs(runs, sharing)
    found = found_in(logs.values(), sharing.selections)
    if not found:
        return logs
    logs = TwoLogs(runs, replace(sharing, others=tuple(found)))
    rivals = logs.rivals()
    if not rivals:
        return logs
    others = tuple(one for one in found if one not in rivals)
    return TwoLogs(runs, replace(sharing, others=others), rivals)


def _is_predicted(view: View, request: Request) -> bool:
    """True if the loss of the case says what ranks should hold, and not only a user's reference;
    nothing says what several steps have read.
    """
    if request.step_count > 1:
        return False
    return not request.training.is_of_the_user or view.examples.give_what_is_expected


def _takes_parts(view: View) -> bool:
    """True if each rank was given the whole batch, and it was not recognised what it reads."""
    return view.setting.shards is None and view.observed.examples_read is None


def asking_one_rank(view: View, request: Request) -> View:
    """The view, which runs the step on one rank if a cause asks for what it leaves there."""
    return replace(view, factor_on_one_rank=cache(lambda: _factor_on_one_rank(view, request)))


def _factor_on_one_rank(view: View, request: Request) -> float | None:
    if not _can_be_asked(view, request) or torch.finfo(view.setting.dtype).eps > COARSEST:
        return None
    rows = _rows(view)
    order = () if rows is None else _order(view, rows)
    alone = operations_on_one_rank(request, min(request.deadline, MOST_SECONDS), order or ())
    return None if alone is None else _factor(view, alone)


def _can_be_asked(view: View, request: Request) -> bool:
    """True for the first step of a user, or of an optimizer, or all its steps, if watched."""
    is_first = request.step_count == 1 or (request.at_each_step and view.setting.step == 0)
    is_all = request.compare == "update"
    return request.strategy is None and (is_first or is_all) and bool(view.observed.by_rank)


def _rows(view: View) -> list[tuple[int, ...]] | None:
    """For each rank, the examples that it reads, in their order; None if they are not known."""
    if view.setting.shards is not None:
        return list(view.setting.shards)
    read = view.observed.examples_read
    if read is None:
        return None
    rows = [tuple(chain.from_iterable(parts)) for parts in read]
    times = Counter(chain.from_iterable(rows))
    is_equal = len({*times.values()}) == 1 and len(times) == view.setting.example_count
    return rows if is_equal else None


def _order(view: View, rows: Sequence[tuple[int, ...]] | None) -> tuple[int, ...] | None:
    """The order of the batch in which the micro-batches of one rank are those of all ranks joined.

    () if there is only one micro-batch; None if there is no such order.
    """
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    if len(counts) != 1:
        return None
    count = max(counts.pop(), 1)
    if count == 1:
        return ()
    if rows is None:
        return None
    read = view.observed.examples_read or [()]
    if all(
        {*map(frozenset, parts)} == {frozenset(own)} for own, parts in zip(rows, read, strict=False)
    ):
        return ()  # each backward pass is of all examples of its rank
    examples = sorted(chain.from_iterable(rows))
    if examples != list(range(view.setting.example_count)) or any(len(one) % count for one in rows):
        return None
    sizes = [len(one) // count for one in rows]
    return tuple(
        example
        for number in range(count)
        for one, size in zip(rows, sizes, strict=True)
        for example in one[number * size : (number + 1) * size]
    )


def _order_of_steps(
    view: View, rows: Sequence[tuple[int, ...]] | None, request: Request
) -> tuple[int, ...] | None:
    """() if each of several steps has one backward pass, or passes over the same examples; None if
    the micro-batches of one rank would not be those of all ranks joined.
    """
    passes = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    seen_together = request.compare == "update"
    if passes == {request.step_count if seen_together else 1}:
        return ()
    return () if _order(view, rows) == () else None


def _parts(view: View, rows: Sequence[tuple[int, ...]] | None) -> list[Indices]:
    """The examples of each backward pass of one rank, if it has several and they are known."""
    read = view.observed.examples_read
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    if rows is None or read is None or len(counts) != 1 or {len(one) for one in read} != counts:
        return []
    if counts <= {0, 1}:
        return []
    return [tuple(chain.from_iterable(each)) for each in zip(*read, strict=True)]


def _factor(view: View, alone: Operations, tolerance: float | None = None) -> float | None:
    """One rank holds so many times the gradient of the big batch; None if it holds another one."""
    sample = view.parameters.sample
    if any(name not in alone.left for name in sample.sizes):
        return None
    values = {name: alone.values[alone.left[name]].tensor for name in sample.sizes}
    if any(values[name].numel() != size for name, size in sample.sizes.items()):
        return None
    held = sample.of(values)
    if not bool(view.expected.any()):
        return None if bool(held.any()) else 1.0
    return factor_between(view.expected, held, tolerance or _tolerance(view, alone))


def _tolerance(view: View, alone: Operations) -> float:
    """How far one rank may be off: by rounding, and by much less than the ranks are."""
    rounding = 100 * torch.finfo(_least_precise(view, alone)).eps
    off = max((unexplained(held, view.expected) for held in view.measured.by_rank), default=1.0)
    return max(NEGLIGIBLE, min(rounding, MUCH_LESS * off))


def _least_precise(view: View, alone: Operations) -> torch.dtype:
    dtypes = {value.dtype for value in alone.values if value.is_floating_point}
    found: list[torch.dtype] = [getattr(torch, name) for name in dtypes]
    return max([view.setting.dtype, *found], key=lambda dtype: torch.finfo(dtype).eps)


# Finds the operations at which the ranks of a step part from one rank with the whole batch.
#
# The step itself is the second implementation here, so nobody has to write one.

READ = (READ_BY_PYTHON, "is_nonzero")
"""The operations behind ``item()`` and ``if``."""


ADDING = frozenset({"add", "add_", "sub", "sub_"})


@dataclass(frozen=True)
class Divergence:
    """One operation at which the ranks part from one rank: all that it was given is related to what
    one rank has there, and its result is not.

    ``operation``: as it ran on one rank. ``by_rank``, ``alone``: its result; empty and None if only
    the ranks run it. ``is_certain``: the result made a gradient wrong. ``multiples``: the lines
    that made multiples of what one rank has, of which it makes its result. ``is_first``: it ran
    before the first backward pass. ``taken``, ``elsewhere``: it has these parts of what one rank
    has, where the other values that it meets are of those parts. ``joined``: a rank, and two
    examples whose rows it joins there; None if it joins rows of the same examples. ``apart``: a
    rank, an element of its result, and what one rank has at this place, if ranks have parts.
    ``runs``: how often its line runs it on each rank, and last on one rank, if that tells.
    ``unreduced``: the backward passes that left what it is given: each rank's own gradient.
    ``given``: how what it is given is related to that on one rank, with the lines where this was
    made.
    """

    operation: Operation
    by_rank: tuple[Value, ...]
    alone: Value | None
    is_certain: bool
    multiples: tuple[CodeLine, ...] = ()
    is_first: bool = False
    taken: Selection | None = None
    elsewhere: Selection | None = None
    joined: tuple[int, int, int] | None = None
    apart: tuple[int, float, float] | None = None
    runs: tuple[int, ...] = ()
    unreduced: tuple[CodeLine, ...] = ()
    given: tuple[tuple[Relation, CodeLine | None], ...] = ()

    @property
    def reads_parts(self) -> bool:
        """True if it is given parts of a sum or mean, one on each rank, and joins none of them."""
        kinds = {how for how, _ in self.given}
        return not self.operation.talks and "sum" in kinds and not self.adds_what_is_whole

    @property
    def adds_what_is_whole(self) -> bool:
        """True if it adds what every rank has whole to the rank's own part of a sum."""
        kinds = [how for how, _ in self.given]
        return self.operation.name in ADDING and sorted(kinds) == ["sum", "whole"]

    @property
    def is_given_right_values(self) -> bool:
        """True if what other lines made is the rows of each rank, or what all have; no number."""
        of_others = {how for how, line in self.given if line != self.operation.line}
        return bool(self.given) and of_others <= {"whole", "rows"} and not self.operation.numbers


def divergences(logs: TwoLogs, rows: Callable[[], Rows] = Rows) -> tuple[Divergence, ...]:
    """The operations at which the ranks part from one rank, the certain ones first.

    Certain are those that made a gradient wrong: from their result to a gradient there is nothing
    but results that one rank does not have either; or they are differentiated. What is made of the
    others cannot be followed, since the step has read them into numbers of Python. ``rows``: makes
    the rows by which examples are recognised, if they are needed.
    """
    wrong = [name for name, number in logs.alone.left.items() if logs.is_wrong(name, number)]
    if not wrong:
        # Operations on owned gradients are fewer than on one rank, so that they have no partners.
        search = _Search(logs, rows)
        first = [next(search.lasting(), None)] if logs.owned else []
        return tuple(search.divergence(n, is_certain=False) for n in first if n is not None)
    found = _divergences(logs, wrong, rows)
    numbers = (logs.number_of(one.operation) for one in found if one.is_certain and one.alone)
    means = [n for n in numbers if n is not None and _is_a_mean_that_is_read(logs, n)]
    if not means:
        return found
    weighted = _divergences(logs.without(means), wrong, rows)
    is_made = any(one.is_certain and not one.operation.in_backward for one in weighted)
    return weighted if is_made else found


def left_unreduced(logs: TwoLogs) -> Iterator[CodeLine]:
    """The calls of backward after which each rank has left its own part of a gradient."""
    for name, number in logs.alone.results.items():
        if name in logs.alone.left and logs.is_part(name, logs.alone.left[name]):
            made = [logs.alone.operations[one] for one in sorted(behind(logs.alone, [number]))]
            lines = [one.line for one in made if one.in_backward and one.line is not None]
            yield from lines[-1:]


def makes_a_mean(operation: Operation) -> bool:
    """True for an operation that may make a mean of rows."""
    return operation.name in ("mean", "div") or called(operation).endswith("_loss")


def _is_a_mean_that_is_read(logs: TwoLogs, number: int) -> bool:
    """True for a mean of rows of which the loss is made. A rank has another one over its own rows,
    which is right if it is weighted there.
    """
    operation, alone = logs.alone.operations[number], logs.alone
    if not makes_a_mean(operation) or operation.in_backward or not operation.differentiable:
        return False
    returned = [alone.values[one] for one in operation.returned[:1] if one is not None]
    readers = (alone.operations[one] for one in logs.readers(number))
    is_read = any(one.differentiable and not one.in_backward for one in readers)
    return is_read and all(one.tensor.numel() == 1 for one in returned)


def _divergences(
    logs: TwoLogs, wrong: Sequence[str], rows: Callable[[], Rows]
) -> tuple[Divergence, ...]:
    search = _Search(logs, rows)
    leading, only_ranks = search.leading_to(wrong)
    certain = sorted({*leading, *search.differentiated()})
    # What is made of another divergence follows from it, unless that one may be right.
    sure, following = {one for one in certain if search.is_sure(one)}, set[int]()
    for number, operation in enumerate(logs.alone.operations):
        if any(one in sure or one in following for one in operation.after):
            following.add(number)
    certain = [one for one in certain if one not in following]
    first = certain[0] if certain else len(logs.alone.operations)
    others = [number for number in search.read_by_python() if number < first]
    found = [
        *(search.divergence(number, is_certain=True) for number in certain),
        *(search.divergence(number, is_certain=False) for number in others[:1]),
    ]
    if any(one.is_certain for one in found):
        return tuple(found)
    of_ranks = (
        Divergence(one, (), None, is_certain=True, runs=_runs(logs, one)) for one in only_ranks
    )
    return (*of_ranks, *found)


def _runs(logs: TwoLogs, operation: Operation) -> tuple[int, ...]:
    """How often the line of an operation runs it on each rank, and on one rank."""
    key = operation.line, operation.name
    return tuple(
        sum((one.line, one.name) == key for one in run.operations)
        for run in (*logs.ranks, logs.alone)
    )


class _Search:
    def __init__(self, logs: TwoLogs, rows: Callable[[], Rows]) -> None:
        self._logs = logs
        self._make_rows = rows
        self._operations = logs.alone.operations

    @cached_property
    def _rows(self) -> Rows:
        return self._make_rows()

    def leading_to(self, wrong: Sequence[str]) -> tuple[set[int], list[Operation]]:
        """The divergences from which nothing but other results leads to one of these gradients, and
        the operations that only ranks run whose results lead there, the last ones of each rank.
        """
        found: set[int] = set()
        only_ranks: dict[CodeLine, Operation] = {}
        for of_rank, partners in zip(self._logs.ranks, self._logs.partners, strict=True):
            on_one_rank = {partner: number for number, partner in partners.items()}
            # Each with whether the operation that reads it is one that one rank runs as well.
            open_ones = [(of_rank.results[name], True) for name in wrong if name in of_rank.results]
            seen: set[int] = set()
            while open_ones:
                here, is_read_by_both = open_ones.pop()
                number = on_one_rank.get(here)
                operation = of_rank.operations[here]
                is_related = number is not None and self._logs.result(number) in RELATED
                # Where a part is right, another part of the same memory may not be.
                if here in seen or (is_related and operation.name not in TAKING_PARTS):
                    continue
                seen.add(here)
                if number is not None and self._diverges(number):
                    found.add(number)
                makes_values = operation.name not in (*UNWRITTEN, *BETWEEN_TWO, *TAKING_PARTS)
                written = None if number is None else self._logs.number_after(number)
                if written is not None and written in partners:
                    open_ones.append((partners[written], True))
                is_shown = operation.draws or (is_read_by_both and makes_values)
                if number is None and is_shown and operation.line:
                    only_ranks.setdefault(operation.line, operation)
                through = number is not None or (is_read_by_both and not makes_values)
                open_ones.extend((one, through) for one in operation.after)
        # Random numbers that no rank draws alone come first: the others are made of them.
        return found, sorted(only_ranks.values(), key=lambda one: not one.draws)

    def differentiated(self) -> Iterator[int]:
        """The divergences in the forward pass, if what they compute is differentiated."""
        for number in self.lasting():
            if self._operations[number].differentiable:
                yield number

    def lasting(self) -> Iterator[int]:
        """The divergences outside of backward passes after which not all is right again."""
        for number, operation in enumerate(self._operations):
            if not operation.in_backward and self._diverges(number) and self._lasts(number):
                yield number

    def _lasts(self, number: int) -> bool:
        """True if not all that is made of the result is right again. Whole numbers, such as places
        in a part, are other ones on ranks that number their own part: what is computed with them
        decides.
        """
        readers = list(self._readers(number))
        if not self._logs.makes_whole_numbers(number):
            return not readers or any(self._logs.result(one) not in RELATED for one in readers)
        return not readers or any(
            self._logs.result(one, first=True) not in RELATED
            and (not self._logs.makes_whole_numbers(one) or self._lasts(one))
            for one in readers
        )

    def read_by_python(self) -> Iterator[int]:
        """The divergences whose results are sent to other ranks or read into numbers of Python."""
        for number in self.lasting():
            if self._operations[number].draws or self._operations[number].name == "aminmax":
                continue  # each rank is seeded with its own number; torch checks what it is given
            open_ones, seen = [number], set[int]()
            while open_ones:
                here = open_ones.pop()
                operation = self._operations[here]
                if operation.talks or operation.name in READ:
                    yield number
                    break
                open_ones.extend(one for one in self._logs.readers(here) if one not in seen)
                seen.update(self._logs.readers(here))

    def _readers(self, number: int) -> Iterator[int]:
        """The operations that use the values that this one wrote."""
        for reader in self._logs.readers(number):
            operation = self._operations[reader]
            if not operation.in_backward and not operation.name.endswith("_like"):
                yield reader

    def is_sure(self, number: int) -> bool:
        """True if the result can be compared, and is not of whole numbers: ranks may count others,
        and pad to other lengths.
        """
        by_rank, alone = self._logs.returned(number, self._logs.places_that_diverge(number)[0])
        is_alike = all(alone is not None and one.shape == alone.shape for one in by_rank)
        is_part = self._logs.apart(by_rank, alone) is not None
        return (is_alike or is_part) and not self._logs.makes_whole_numbers(number)

    def divergence(self, number: int, *, is_certain: bool) -> Divergence:
        place = self._logs.places_that_diverge(number)[0]
        by_rank, alone = self._logs.returned(number, place)
        operation = self._operations[number]
        backward = (n for n, one in enumerate(self._operations) if one.in_backward)
        taken, elsewhere = self._logs.taken(by_rank, alone)
        return Divergence(
            operation,
            by_rank,
            alone,
            is_certain,
            multiples=tuple(dict.fromkeys(self._multiples(number, operation.line))),
            is_first=number < next(backward, 0),
            taken=taken,
            elsewhere=elsewhere,
            joined=self._joined(number),
            apart=self._logs.apart(by_rank, alone),
            unreduced=tuple(self._unreduced(number)),
            given=tuple(
                (how, None if one is None or one.in_backward else one.line)
                for how, one in self._logs.given(number)
            ),
        )

    def _unreduced(self, number: int) -> Iterator[CodeLine]:
        """The backward passes that left what the operation is given, also through other operations
        that return a part of a sum.
        """
        operation = self._operations[number]
        open_ones, seen = [] if operation.in_backward or operation.talks else [number], set[int]()
        while open_ones:
            here = open_ones.pop()
            seen.add(here)
            for given, writer in self._logs.given(here):
                if given != "sum" or writer is None:
                    continue
                if writer.in_backward and writer.line is not None:
                    yield writer.line
                before = None if writer.in_backward else self._logs.number_of(writer)
                if before is not None and before < here and before not in seen:
                    open_ones.append(before)

    def _joined(self, number: int) -> tuple[int, int, int] | None:
        """A rank on which the operation joins different examples, and two of them; None if it does
        so on one rank as well, or on none.
        """
        if joined(self._rows, self._logs.alone, self._operations[number]) is not None:
            return None
        for rank, operation in enumerate(self._logs.on_ranks(number)):
            found = joined(self._rows, self._logs.ranks[rank], operation)
            if found is not None:
                return rank, *found
        return None

    def _multiples(self, number: int, line: CodeLine | None) -> Iterator[CodeLine]:
        """The other lines that made multiples, of which this one makes its result."""
        for given, writer in self._logs.given(number):
            if given not in ("sum", "scaled") or writer is None:
                continue
            if writer.line != line and writer.line is not None and given == "scaled":
                yield writer.line
            elif writer.line == line:
                before = self._logs.number_of(writer)
                if before is not None and before < number:
                    yield from self._multiples(before, line)

    def _diverges(self, number: int) -> bool:
        """True if the result is another one, and nothing is that the operation was given.

        What no operation wrote was made of numbers of Python, by this line as far as is known.
        """
        return bool(self._logs.places_that_diverge(number)) and not self._is_given_others(number)

    def _is_given_others(self, number: int) -> bool:
        """True if one of the values that the operation was given is another one, or is a view of
        one, or a tensor with one in it, that cannot be compared itself.
        """
        open_ones, seen = [number], {number}
        while open_ones:
            for given, writer in self._logs.given(open_ones.pop()):
                if given == "other" and writer is not None:
                    return True
                if given != "unknown" or writer is None or writer.name not in (*VIEWS, *PACKING):
                    continue
                before = self._logs.number_of(writer)
                if before is not None and before not in seen:
                    seen.add(before)
                    open_ones.append(before)
        return False


# Collectives in a forward pass of which autograd knows nothing, on the way to wrong gradients.


def past_autograd(logs: TwoLogs) -> tuple[Operation, ...]:
    """The collectives outside of backward passes that took what has a gradient, left something
    that was not computed from it as far as autograd knows, and went into a wrong gradient.

    Each line once, in the order in which the first rank ran them.
    """
    wrong = [name for name, number in logs.alone.left.items() if logs.is_wrong(name, number)]
    first = logs.ranks[0]
    found: dict[object, Operation] = {}
    for number in sorted(
        behind(first, [first.results[one] for one in wrong if one in first.results])
    ):
        operation = first.operations[number]
        if operation.loses_gradient and not operation.in_backward and operation.line is not None:
            found.setdefault(operation.line, operation)
    return tuple(found.values())
