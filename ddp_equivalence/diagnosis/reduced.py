"""What the ranks were seen to reduce: gradients or parameters, in which groups, how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import REDUCING, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CollectiveCall, Contents, Kind

OF_PARAMETERS = (Contents.PARAMETERS, Contents.COPIES_OF_PARAMETERS)
NOT_OF_GRADIENTS = (*OF_PARAMETERS, Contents.BUFFERS, Contents.OTHER)

FEWEST = 2
"""A reduction of a single element is that of a loss or a count, unless a model has only one."""


def gradients_were_reduced(view: View) -> bool | None:
    """True unless it is certain that no gradient was reduced; None if nothing is known.

    A reduction counts if its tensors are gradients or copies of them, or if C++ issued it, as
    DistributedDataParallel does. Temporary tensors of unknown contents count if they have as many
    elements as the model.
    """
    calls = view.observed.calls
    if calls.reductions:
        return True
    reduced = view.observed.reduced_floats
    if reduced is None:
        return None
    total = view.parameters.total
    accounted = []
    for rank in view.observed.by_rank:
        by_contents = [
            call.collective
            for call in view.observed.by_rank[rank].calls
            if _is_reduction(call) and call.collective is not None
        ]
        unknown = sum(one.elements for one in by_contents if one.contents is Contents.OTHER)
        if unknown >= max(total, FEWEST):
            return True
        accounted.append(
            sum(one.elements for one in by_contents if one.contents in NOT_OF_GRADIENTS)
        )
    return reduced - max(accounted, default=0) >= min(FEWEST, total)


def with_reduced_gradients(view: View) -> set[str]:
    """The parameters of which a gradient, or a copy of it, was seen to be reduced on every rank."""
    return _named_on_every_rank(view, reduces_gradients)


def reduced_parameters(view: View) -> set[str]:
    """The parameters that every rank was seen to reduce among ranks; empty if none was."""
    return _named_on_every_rank(
        view,
        lambda call: (
            _is_reduction(call)
            and call.collective is not None
            and call.collective.contents in OF_PARAMETERS
        ),
    )


def passes_without_sync(calls: Iterable[Call]) -> list[dict[str, Call]]:
    """For each backward pass among the calls of a rank: the parameters that FSDP was told not to
    reduce in it -> the call that told it.
    """
    off: dict[str, Call] = {}
    passes = []
    for call in calls:
        if call.kind is Kind.SYNCHRONISATION:
            told = {} if call.value else dict.fromkeys(call.names, call)
            off = {name: one for name, one in off.items() if name not in call.names} | told
        elif call.kind is Kind.BACKWARD:
            passes.append(off)
    return passes


def _named_on_every_rank(view: View, counts: Callable[[Call], bool]) -> set[str]:
    """The parameters in the collectives that count, on every rank that was observed."""
    by_rank = [
        {name for one in calls if one.collective and counts(one) for name in one.collective.names}
        for calls in map(view.observed.calls.of, view.observed.by_rank)
    ]
    return set.intersection(*by_rank) if by_rank else set()


def _is_reduction(call: Call) -> bool:
    return (
        call.kind is Kind.COLLECTIVE
        and call.collective is not None
        and call.collective.op in REDUCING
    )


MOST_GROUPS = 3

Groups = tuple[tuple[int, ...], ...]

OF_GRADIENTS = (Contents.GRADIENTS, Contents.COPIES_OF_GRADIENTS)


def separate_groups(view: View) -> Groups:
    """The groups of ranks that exchanged gradients, directly or over others.

    () if one group has all ranks, if a rank reduced no gradient in a call of its own, or if DDP has
    reduced gradients too.
    """
    if not view.observed.covers_every_rank or _ddp_reduced(view):
        return ()
    joined = {rank: {rank} for rank in range(view.world_size)}
    by_rank = {rank: list(_exchanges(view, rank)) for rank in joined}
    if not all(any(map(reduces_gradients, calls)) for calls in by_rank.values()):
        return ()
    for calls in by_rank.values():
        for call in calls:
            assert call.collective is not None
            together = set().union(*(joined[rank] for rank in call.collective.ranks))
            for rank in together:
                joined[rank] = together
    groups = tuple(sorted({tuple(sorted(ranks)) for ranks in joined.values()}))
    return groups if len(groups) > 1 else ()


def wrapped_groups(view: View) -> Groups:
    """The groups in which DDP reduced, as the step has made them; () unless that is certain."""
    if not _ddp_reduced(view) or not reduced_only_in_subgroups(view):
        return ()
    made = [
        {
            tuple(sorted(call.ranks))
            for call in seen.calls
            if call.kind is Kind.NEW_GROUP and rank in call.ranks
        }
        for rank, seen in sorted(view.observed.by_rank.items())
    ]
    size = _ranks_of_ddp(view)
    if size is not None:
        made = [{group for group in of_rank if len(group) == size} for of_rank in made]
    if any(len(of_rank) != 1 for of_rank in made):
        return ()
    groups = tuple(sorted(set().union(*made)))
    return groups if sum(map(len, groups)) == view.world_size and len(groups) > 1 else ()


def reduced_only_in_subgroups(view: View) -> bool:
    """True if DDP has fewer than all ranks and the step itself reduces no gradient, or if torch's
    flight recorder shows reductions on every rank, and none among all ranks.

    Collectives of single numbers do not count.
    """
    size = _ranks_of_ddp(view)
    if size is not None and size < view.world_size and not view.observed.calls.reductions:
        return True
    if not view.observed.covers_every_rank or view.observed.reduced_floats is None:
        return False
    for seen in view.observed.by_rank.values():
        reductions = [
            one for one in seen.collectives or () if "reduce" in one.op and one.elements > 1
        ]
        if not reductions or any(not one.group for one in reductions):
            return False
    return True


def groups_text(groups: Groups) -> str:
    """The groups as text: ``groups {0, 1} and {2, 3}``."""
    shown = [f"{{{', '.join(map(str, group))}}}" for group in groups[:MOST_GROUPS]]
    if len(groups) > MOST_GROUPS:
        shown.append(f"{len(groups) - MOST_GROUPS} more")
    word = "groups" if len(groups) > 1 else "group"
    return f"{word} {' and '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))}"


def _ddp_reduced(view: View) -> bool:
    return any(any(wrapper.synchronised) for wrapper in view.observed.wrappers)


def _ranks_of_ddp(view: View) -> int | None:
    """Among how many ranks DDP reduced; None if that is unknown, or not always the same."""
    sizes = {
        wrapper.logged.get("world_size")
        for wrapper in view.observed.wrappers
        if any(wrapper.synchronised)
    }
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def _exchanges(view: View, rank: int) -> Iterator[Call]:
    """The collectives that may have carried a gradient: also those whose contents are not known,
    if they are as large as the largest parameter.
    """
    largest = max(view.parameters.sample.sizes.values(), default=0)
    for call in view.observed.calls.of(rank):
        collective = call.collective
        if call.kind is not Kind.COLLECTIVE or collective is None:
            continue
        unknown = collective.contents is Contents.OTHER and collective.elements >= largest
        if collective.contents in OF_GRADIENTS or unknown:
            yield call


@dataclass(frozen=True)
class Repeated:
    """A gradient that was added up among the same ranks more than once.

    ``counts``: for each backward pass that computed a part of it, how many times as often this
    part counts as after one sum. ``calls``: the collectives that add it up, on one rank, in order.
    """

    counts: tuple[int, ...]
    calls: tuple[Call, ...]


def sums_repeated(view: View) -> Mapping[str, Repeated]:
    """Parameter -> how its gradient was added up again, if that is the same on every rank.

    A gradient counts only if whole gradients, and nothing else, went into the collectives.
    """
    if not view.observed.covers_every_rank or view.world_size == 1:
        return {}
    by_rank = [_of_rank(view, rank) for rank in range(view.world_size)]
    first = by_rank[0]
    return {
        name: one
        for name, one in first.items()
        if all(name in other and other[name].counts == one.counts for other in by_rank)
    }


def _of_rank(view: View, rank: int) -> dict[str, Repeated]:
    backwards = 0
    groups: dict[str, dict[int, Counter[frozenset[int]]]] = {}
    made: dict[str, list[Call]] = {}
    for call in view.observed.calls.of(rank):
        backwards += call.kind is Kind.BACKWARD
        if call.change is not None and call.change.cleared and backwards:
            for name in call.change.names:
                groups.pop(name, None)
                made.pop(name, None)
        collective = call.collective
        if collective is None or not backwards or not adds_whole_gradients(view, collective):
            continue
        for name in collective.names:
            of_name = groups.setdefault(name, {})
            made.setdefault(name, []).append(call)
            for number in range(backwards):
                of_name.setdefault(number, Counter())[frozenset(collective.ranks)] += 1
    found = {}
    for name, of_name in groups.items():
        counts = tuple(
            prod(len(group) ** (times - 1) for group, times in of_name[number].items())
            if number in of_name
            else 0
            for number in range(backwards)
        )
        if max(counts, default=0) > 1:
            found[name] = Repeated(counts, tuple(made[name]))
    return found


def adds_whole_gradients(view: View, collective: CollectiveCall) -> bool:
    """True if a collective adds up gradients in place, each of them with all of its elements."""
    known = set(collective.names) <= set(view.parameters.names)
    return (
        collective.op == "all_reduce"
        and collective.reduce_op == "SUM"
        and collective.contents is Contents.GRADIENTS
        and len(collective.ranks) > 1
        and known
        and collective.elements == view.parameters.total_of(collective.names)
    )


def sum_is_right(view: View) -> bool:
    """True if the ranks were seen to compute gradients whose sum is that of the big batch."""
    if view.observed_gradients is None or not bool(view.expected.any()):
        return False
    return nearly_equal(view.local_gradients[0].sum(0), view.expected)


# Which tensors a step declares to be equal on several ranks, although they are not.


class Unequal(NamedTuple):
    """``call``: of the lowest of these ranks. ``norms``: rank -> the norm of what it has there."""

    call: Call
    norms: Mapping[int, float]

    @property
    def is_taken_apart(self) -> bool:
        """True if a tensor of several ranks is taken apart, and not put together."""
        return self.call.what != "from_local"

    @property
    def note(self) -> str:
        """What the line does that takes it apart, as a clause."""
        if self.call.what == "Partial":
            return "takes the part of this rank, which has to be added up (Partial), for the whole"
        return "takes the gradient of each rank for the whole one"

    @property
    def fix(self) -> str:
        """What to change at the line that takes it apart."""
        if self.call.what == "Partial":
            return "call full_tensor(), which adds up the parts of the ranks, not to_local()"
        return (
            "give to_local grad_placements=[Partial()], which adds up the gradients of these ranks"
        )


def unequal_copies(view: View) -> Unequal | None:
    """The first tensor that is not the same on all ranks on which a line takes it for equal.

    None if there is none. Gradients are left out if the step reduces all that differ itself.
    """
    by_rank = [_declared_equal(view, rank) for rank in range(view.world_size)]
    for ranks in dict.fromkeys(call.ranks for calls in by_rank for call in calls):
        of_ranks = [[call for call in by_rank[rank] if call.ranks == ranks] for rank in ranks]
        if len(set(map(len, of_ranks))) > 1:
            continue
        for together in zip(*of_ranks, strict=True):
            first, norms = together[0], [call.value or 0.0 for call in together]
            is_returned = first.what != "from_local"
            if is_returned and view.measured.differing <= _reduced_in(view, ranks):
                continue
            eps = torch.finfo(getattr(torch, first.dtype)).eps if "float" in first.dtype else 0.0
            if max(norms) - min(norms) > eps**0.5 * max(norms):
                return Unequal(first, dict(zip(ranks, norms, strict=True)))
    return None


def _reduced_in(view: View, ranks: tuple[int, ...]) -> set[str]:
    """The parameters whose gradients the step was seen to reduce among these ranks, or more."""
    return {
        name
        for place in view.observed.calls.reductions
        for call in place.calls
        if call.collective is not None and {*ranks} <= {*call.collective.ranks}
        for name in call.collective.names
    }


def _declared_equal(view: View, rank: int) -> list[Call]:
    return [call for call in view.observed.calls.of(rank) if call.kind is Kind.EQUAL]
