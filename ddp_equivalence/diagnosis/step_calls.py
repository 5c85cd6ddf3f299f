"""The calls that the ranks were seen to make in one step, and the places that made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import Call, CodeLine, Contents, Kind

Test = Callable[[Call], bool]

REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
"""Collectives that add up what the ranks give."""


@dataclass
class Place:
    """A line, and all calls of one kind that it made. ``by_rank``: rank -> the calls, in order."""

    line: CodeLine
    kind: Kind
    by_rank: dict[int, list[Call]] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that came here."""
        return tuple(sorted(self.by_rank))

    @property
    def first(self) -> Call:
        """The first call of the lowest rank."""
        return self.by_rank[self.ranks[0]][0]

    @property
    def calls(self) -> list[Call]:
        """The calls of the lowest rank that came here."""
        return self.by_rank[self.ranks[0]]

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks of its collectives, on all ranks, each once."""
        found = {
            call.collective.ranks
            for calls in self.by_rank.values()
            for call in calls
            if call.collective is not None
        }
        return tuple(sorted(found))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that its calls were about, on the lowest rank, in order and each once."""
        found: dict[str, None] = {}
        for call in self.calls:
            about = call.collective or call.change or call
            found |= dict.fromkeys(about.names)
        return tuple(found)

    def pointed(self, note: str = "", is_fault: bool = False, missing: str = "") -> PointedLine:
        """The line, to be shown in a report."""
        return PointedLine(self.line, note, is_fault, missing)


@dataclass(frozen=True)
class StepCalls:
    """``by_rank``: rank -> its calls in one step, in their order; empty if none was recorded."""

    by_rank: Mapping[int, tuple[Call, ...]]

    def of(self, rank: int) -> tuple[Call, ...]:
        """The calls of one rank."""
        return self.by_rank.get(rank, ())

    def places(self, *kinds: Kind, where: Test = lambda call: True) -> list[Place]:
        """The lines that made calls of these kinds for which ``where`` is true.

        They are in the order in which the lowest rank came to them first. A call without a known
        line is left out.
        """
        places: dict[tuple[CodeLine, Kind], Place] = {}
        for rank in sorted(self.by_rank):
            for call in self.by_rank[rank]:
                line = call.users_line or call.line
                if line is None or call.kind not in kinds or not where(call):
                    continue
                place = places.setdefault((line, call.kind), Place(line, call.kind))
                place.by_rank.setdefault(rank, []).append(call)
        return list(places.values())

    @cached_property
    def reductions(self) -> list[Place]:
        """The lines that reduce gradients or copies of them among ranks."""
        return self.places(Kind.COLLECTIVE, where=reduces_gradients)

    @cached_property
    def backwards(self) -> list[Place]:
        """The lines that call backward."""
        return self.places(Kind.BACKWARD)

    def changes(self, where: Test = lambda call: True) -> list[Place]:
        """The lines that change ``.grad``, other than by backward or a collective."""
        return self.places(Kind.CHANGE, where=where)

    def multiplied_by(self, factor: float) -> list[Place]:
        """The lines that multiply gradients by this number."""

        def is_it(call: Call) -> bool:
            value = call.change.factor if call.change is not None else None
            return value is not None and abs(value - factor) <= 1e-5 * abs(factor)

        return self.changes(is_it)


def reduces_gradients(call: Call) -> bool:
    """True for a collective that reduces gradients, or copies of them."""
    collective = call.collective
    return (
        collective is not None
        and collective.op in REDUCING
        and collective.contents in (Contents.GRADIENTS, Contents.COPIES_OF_GRADIENTS)
    )
