"""Of which ranks' own gradients a gradient is a mixture, and why some ranks are not in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.of_reduction import way_to
from ddp_equivalence.diagnosis.lines.origins import links_of
from ddp_equivalence.diagnosis.lines.source_tree import inside, place_of, run_lines
from ddp_equivalence.diagnosis.setting import REDUCING, CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, ranked
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind, thinned
from ddp_equivalence.measurement.observation import Observation

# Says of which ranks' own gradients a gradient is a mixture, and in which weights.

SAME_WEIGHT = 1e-3
"""Weights that differ by less than this, relative to the largest one, are equal."""

SPARE = 3
"""A mixture of n gradients is believed only of n elements and so many more."""


@dataclass(frozen=True)
class Mix:
    """``weights``: of the pieces of all ranks, shape (pieces,). ``of``: the parameters whose
    gradients these are, if other ones than those that hold them; () if the same.
    """

    weights: Tensor
    of: tuple[str, ...] = ()

    @property
    def uniform(self) -> float | None:
        """The weight that all pieces have; None if they differ."""
        most = float(self.weights.abs().max()) if len(self.weights) else 0.0
        spread = float(self.weights.max() - self.weights.min()) if len(self.weights) else 0.0
        return float(self.weights.mean()) if spread <= SAME_WEIGHT * most else None


@dataclass(frozen=True)
class Mixtures:
    """``own``: parameter -> what each piece computed, shape (pieces, elements that are kept).

    ``ranks`` and ``numbers``: of each piece. ``tolerance``: the largest relative difference of two
    equal vectors. ``groups``: sets of ranks in which something was reduced.
    """

    own: Mapping[str, Tensor]
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    tolerance: float
    groups: tuple[tuple[int, ...], ...] = ()

    def of(self, rank: int, values: Mapping[str, Tensor]) -> Mix | None:
        """The mixture that these gradients of a rank are; None if they are none, or if too few
        elements are known.
        """
        names = [name for name in values if name in self.own]
        if not names or any(len(values[one]) != self.own[one].shape[1] for one in names):
            return None
        held = torch.cat([values[name] for name in names])
        own = torch.cat([self.own[name] for name in names], dim=1)
        found = self._mix(rank, held, own)
        if found is not None:
            return Mix(found)
        return self._of_another(rank, names, values) if len(names) == 1 else None

    def _of_another(
        self, rank: int, names: Sequence[str], values: Mapping[str, Tensor]
    ) -> Mix | None:
        """The mixture of another parameter's gradients that this parameter holds."""
        held = values[names[0]]
        for name, own in self.own.items():
            if name != names[0] and own.shape[1] == len(held) > SPARE:
                found = self._mix(rank, held, own)
                if found is not None and bool(found.any()):
                    return Mix(found, (name,))
        return None

    def _mix(self, rank: int, held: Tensor, own: Tensor) -> Tensor | None:
        if not bool(held.isfinite().all()) or not bool(own.isfinite().all()):
            return None
        if not bool(held.any()):
            return torch.zeros(len(own), dtype=torch.float64)
        norm = float(held.norm())
        for chosen in self._likely(rank):
            mixed = chosen @ own
            square = float(mixed @ mixed)
            if square and len(held) > 1:
                factor = float(held @ mixed) / square
                if float((held - factor * mixed).norm()) <= self.tolerance * norm:
                    return factor * chosen
        if len(held) < len(own) + SPARE:
            return None
        scale = own.norm(dim=1)
        used = scale > 0
        if not bool(used.any()):
            return None
        matrix = (own[used] / scale[used, None]).T
        solved = torch.linalg.lstsq(matrix, held, rcond=1e-10, driver="gelsd")
        if int(solved.rank) < matrix.shape[1]:
            return None
        if float((held - matrix @ solved.solution).norm()) > self.tolerance * norm:
            return None
        weights = torch.zeros(len(own), dtype=torch.float64)
        weights[used] = solved.solution / scale[used]
        return weights

    def _likely(self, rank: int) -> Iterator[Tensor]:
        """Sets of pieces that gradients are often the sum of, the likeliest first."""
        ranks, numbers = torch.tensor(self.ranks), torch.tensor(self.numbers)
        sets = [torch.ones(len(ranks), dtype=torch.bool), ranks == rank]
        sets += [torch.isin(ranks, torch.tensor(group)) for group in self.groups]
        sets += [ranks == other for other in sorted(set(self.ranks) - {rank})]
        for one in sets:
            yield one.double()
        for last in sorted(set(self.numbers)):
            for one in sets[:2]:
                yield (one & (numbers <= last)).double()
                yield (one & (numbers == last)).double()


def mixtures_of(pieces: Pieces, each: int, groups: tuple[tuple[int, ...], ...]) -> Mixtures:
    """``each``: so many elements of each gradient are kept in the states of the watched run."""
    all_pieces = pieces.all
    scale = pieces.view.setting.scale
    own = {
        name: torch.stack([thinned(one.gradient[place] / scale, each) for one in all_pieces])
        for name, place in pieces.view.parameters.places.items()
        if all_pieces
    }
    return Mixtures(
        own=own,
        ranks=tuple(one.rank for one in all_pieces),
        numbers=tuple(one.number for one in all_pieces),
        tolerance=pieces.tolerance,
        groups=groups,
    )


# A mixture of the ranks' own gradients, in words.

MOST_RANKS_NAMED = 6


def mix_text(mix: Mix | None, pieces: Pieces) -> str:
    """The mixture as a noun phrase: ``the mean of the ranks' own gradients``."""
    if mix is None:
        return "no mixture of the ranks' own gradients"
    of = f" of {mix.of[0]}" if mix.of else ""
    most = float(mix.weights.abs().max()) if len(mix.weights) else 0.0
    if not most:
        return "zero"
    weight = mix.uniform
    world_size = pieces.view.world_size
    if weight is not None:
        return _of_all_ranks(weight, world_size, of)
    by_rank: dict[int, set[float]] = {}
    for piece, one in zip(pieces.all, mix.weights.tolist(), strict=True):
        by_rank.setdefault(piece.rank, set()).add(0.0 if abs(one) <= SAME_WEIGHT * most else one)
    flat = {
        rank: weights.pop() if max(weights) - min(weights) <= SAME_WEIGHT * most else None
        for rank, weights in by_rank.items()
    }
    if None in flat.values():
        return f"a mixture of the own gradients{of} in which backward passes count differently"
    counted = [rank for rank, one in flat.items() if one]
    values = [one for one in flat.values() if one]
    if max(values) - min(values) <= SAME_WEIGHT * most:
        what = "the own gradient" if len(counted) == 1 else "the sum of the own gradients"
        times = "" if abs(values[0] - 1) <= SAME_WEIGHT else f"{text_of(values[0], '.4g')} times "
        return f"{times}{what}{of} of {ranked(counted, world_size)}"
    shown = [
        f"rank {rank} {text_of(one or 0.0, '.4g')}"
        for rank, one in list(flat.items())[:MOST_RANKS_NAMED]
    ]
    more = ", ..." if len(flat) > MOST_RANKS_NAMED else ""
    return f"a mixture of the own gradients{of} with these weights: {', '.join(shown)}{more}"


def _of_all_ranks(weight: float, world_size: int, of: str) -> str:
    if world_size == 1:
        return f"{text_of(weight, '.4g')} times what backward computed{of}"
    for value, what in ((1 / world_size, "mean"), (1.0, "sum")):
        if abs(weight - value) <= SAME_WEIGHT * value:
            return f"the {what} of the ranks' own gradients{of}"
    return f"{text_of(weight, '.4g')} times the sum of the ranks' own gradients{of}"


# No collective that Python issued after backward joins some ranks with the others.


def ranks_not_joined(pieces: Pieces) -> Whereabouts | None:
    """None unless all collectives after backward were seen, and keep the ranks in several sets."""
    view = pieces.view
    places = view.observed.calls.places(Kind.COLLECTIVE, where=_after_backward)
    reducing = [
        one
        for one in places
        if one.first.collective is not None and one.first.collective.op in REDUCING
    ]
    if view.observed.wrappers or not reducing or _sends(view):
        return None
    sets = _joined(view.world_size, [group for one in places for group in one.groups])
    if len(sets) == 1 or min(map(len, sets)) < 2:
        return None
    apart = ", or with ".join(ranked(one, view.world_size) for one in sets[1:])
    what = f"joins {ranked(sets[0], view.world_size)} with {apart}"
    last = reducing[-1]
    return Whereabouts(
        "reduction",
        "no collective joins all ranks",
        f"No collective that Python issued after backward {what}.",
        distinct(
            [
                *_group_of(view, last),
                last.pointed(f"over {ranked(last.groups[0], view.world_size)}, for example", True),
            ]
        ),
        fix=f"reduce over groups that join all {view.world_size} ranks.",
    )


def _after_backward(call: Call) -> bool:
    return call.backwards > 0


def _sends(view: View) -> bool:
    return any(
        call.kind is Kind.POINT_TO_POINT
        for rank in view.observed.by_rank
        for call in view.observed.calls.of(rank)
    )


def _joined(world_size: int, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The sets of ranks that groups join, directly or through others."""
    sets = [{rank} for rank in range(world_size)]
    for group in groups:
        touched = [one for one in sets if one & set(group)]
        sets = [one for one in sets if not one & set(group)] + [set().union(*touched)]
    return sorted(tuple(sorted(one)) for one in sets)


def _group_of(view: View, place: CallSite) -> list[PointedLine]:
    """The line that gave the group of a collective its name."""
    run = run_lines(view, place.ranks[0])
    at = place_of(place.line.file, place.line.number)
    for node in [at.statement, *inside(at.statement)] if at is not None else ():
        if isinstance(node, ast.keyword) and node.arg == "group":
            assert at is not None
            way = way_to(view, place.first)
            links = links_of(run, at, node.value, way[1:])
            named = [one for one in links if one.line != place.line]
            note = f"the group of line {place.line.number}"
            return [PointedLine(one.line, f"sets {one.name}, {note}", True) for one in named[:1]]
    return []


# The lines of the user's code that only some ranks ran.

SAME = 1e-3
"""Values that differ by less than this, relative to the largest one, are equal."""


def lines_only_on(observed: Mapping[int, Observation], ranks: Sequence[int]) -> list[PointedLine]:
    """The first line that exactly these ranks ran, or exactly the others; [] if there is none.

    All steps count, and lines of the forward and the backward pass too.
    """
    world_size = len(observed)
    if len(ranks) in (0, world_size):
        return []
    others = tuple(rank for rank in observed if rank not in ranks)
    run: dict[CodeLine, list[int]] = {}
    order: dict[CodeLine, int] = {}
    for rank, seen in sorted(observed.items()):
        for number, line in enumerate(seen.trace.lines_run or {}):
            run.setdefault(line, []).append(rank)
            order.setdefault(line, number)
    found = [line for line, by in run.items() if tuple(by) in (tuple(ranks), others)]
    if not found:
        return []
    # Up to the first line that not all ranks run, all of them have run the same lines.
    first = min(found, key=lambda line: order[line])
    who = ranked(run[first], world_size)
    note = f"only {who} {'runs' if len(run[first]) == 1 else 'run'} this line"
    return [PointedLine(first, note, True)]


def odd_ranks(values: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks whose values are not those of most; () if most ranks have no common value."""
    most = max(map(abs, values.values()), default=0.0)
    near = {
        rank: [other for other, value in values.items() if abs(value - one) <= SAME * most]
        for rank, one in values.items()
    }
    common = max(near.values(), key=len, default=[])
    if len(common) * 2 <= len(values):
        return ()
    return tuple(rank for rank in values if rank not in common)
