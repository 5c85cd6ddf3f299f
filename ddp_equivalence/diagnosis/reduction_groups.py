"""The groups of ranks in which gradients were seen to be reduced."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.diagnosis.step_calls import reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Contents, Kind

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
    if not view.observed.covers_every_rank or view.observed.reduced_elements is None:
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
