"""Follows the tensors that the user's lines make of the ranks' own gradients, by their values.

Every element is looked up among the sums of what some of the ranks computed for one element.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.lines.source_tree import (
    Place,
    called_name,
    functions_named,
    inside,
    place_of,
)
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import ranked
from ddp_equivalence.measurement.gradient_watch import factor_between
from ddp_equivalence.measurement.local_tensors import MOST_KEPT
from ddp_equivalence.measurement.trace import LocalTensor, distance_of, unpacked

MOST_RANKS = 6
"""With more ranks there are too many sums."""

MOST_SUMS = 4_000_000

FEWEST = 4
"""So many elements of a tensor, at least, must be other than zero."""

ROUNDING = 64.0
"""Two numbers are equal if they differ by at most this many eps, relative to themselves."""

SMALLEST_TOLERANCE = 1e-10

SAME = 1e-9
"""A tensor is a multiple of another one if this much of it, at most, is something else."""

UNKNOWN = -1

FRESH = ("empty", "zeros", "ones", "full", "rand", "new_", "arange", "tensor", "normal")
"""What makes a tensor that does not depend on the values of others begins with one of these."""


@dataclass(frozen=True)
class Sums:
    """``values``: all sums, in ascending order, shape (sums,). ``masks``: of which ranks each is
    the sum, rank r as bit r. ``elements``: of which element of the gradients. ``tolerance``:
    relative.
    """

    values: Tensor
    masks: Tensor
    elements: Tensor
    tolerance: float

    def masks_of(self, sample: bytes) -> Tensor:
        """For each element that is not zero, the ranks that it is a sum of; ``UNKNOWN`` if none."""
        held = unpacked(sample)
        return self._looked_up(held[held != 0], self.masks)

    def elements_of(self, sample: bytes) -> Tensor:
        """For each element, the element of the gradients that it belongs to, or ``UNKNOWN``."""
        held = unpacked(sample)
        return torch.where(held != 0, self._looked_up(held, self.elements), UNKNOWN)

    def _looked_up(self, held: Tensor, of_sums: Tensor) -> Tensor:
        at = torch.searchsorted(self.values, held).clamp(max=len(self.values) - 1)
        found = torch.full_like(at, UNKNOWN)
        for near in (at, (at - 1).clamp(min=0)):
            equal = (self.values[near] - held).abs() <= self.tolerance * held.abs()
            found = torch.where(equal & (found == UNKNOWN), of_sums[near], found)
        return found


def sums_of(pieces: Pieces) -> Sums | None:
    """The sums of all sets of ranks, also divided by their number; None if not all is known."""
    view = pieces.view
    world_size, elements = pieces.own.shape
    sets = 2**world_size - 1
    if world_size < 2 or world_size > MOST_RANKS or 2 * sets * elements > MOST_SUMS:
        return None
    if view.parameters.total != view.parameters.whole_total:
        return None
    own = pieces.own.double() / view.setting.scale
    values, masks, places = [], [], []
    for mask in range(1, sets + 1):
        chosen = [rank for rank in range(world_size) if mask >> rank & 1]
        total = own[chosen].sum(0)
        for divisor in (1, world_size):
            values.append(total / divisor)
            masks.append(torch.full((elements,), mask))
            places.append(torch.arange(elements))
    order = torch.cat(values).argsort()
    eps = torch.finfo(view.setting.dtype).eps
    return Sums(
        torch.cat(values)[order],
        torch.cat(masks)[order],
        torch.cat(places)[order],
        max(SMALLEST_TOLERANCE, ROUNDING * eps),
    )


def line_of_other_values(pieces: Pieces, rank: int) -> list[PointedLine]:
    """The first line that made something else of gradients than their sums, in their order."""
    return line_that_mixes_up(pieces, rank) or line_that_reorders(pieces, rank)


def line_that_mixes_up(pieces: Pieces, rank: int) -> list[PointedLine]:
    """The first line that made, of sums of the ranks' gradients, a tensor that holds none."""
    for one, masks, sources in _followed(pieces, rank):
        unknown = masks == UNKNOWN
        is_none = len(masks) >= FEWEST and 2 * int(unknown.sum()) > len(masks)
        known = [name for name, of in sources if len(of) and not bool((of == UNKNOWN).any())]
        if is_none and known and len(known) == len(sources):
            what = one.name or "the result"
            note = f"{known[0]} holds gradients or their sums, {what} does not"
            return [PointedLine(one.line, note, True)]
    return []


def line_that_reorders(pieces: Pieces, rank: int) -> list[PointedLine]:
    """The first line that put elements in another order than a tensor of the same size had them."""
    sums, seen = sums_of(pieces), pieces.view.observed.by_rank.get(rank)
    if sums is None or seen is None:
        return []
    first: dict[int, tuple[str, Tensor]] = {}
    for one in seen.trace.local_tensors:
        if one.step != pieces.view.setting.step or one.elements < pieces.own.shape[1]:
            continue
        places = sums.elements_of(one.values)
        if 2 * int((places != UNKNOWN).sum()) < max(2 * FEWEST, len(places)):
            continue
        # Padding at the end leaves the elements where they are.
        name, before = first.setdefault(distance_of(one.elements, MOST_KEPT), (one.name, places))
        most = min(len(places), len(before))
        both = (places[:most] != UNKNOWN) & (before[:most] != UNKNOWN)
        alike = int((places[:most] == before[:most])[both].sum())
        if 2 * alike < int(both.sum()):
            what = one.name or "the result"
            note = f"{what} has the elements in another order than {name or 'before'}"
            return [PointedLine(one.line, note, True)]
    return []


def line_that_sums(pieces: Pieces, rank: int, ranks: Sequence[int]) -> list[PointedLine]:
    """The first line that made a tensor which holds the sums of just these ranks' gradients."""
    wanted = sum(1 << one for one in ranks)
    for one, masks, sources in _followed(pieces, rank):
        if len(masks) < FEWEST or not bool((masks == wanted).all()):
            continue
        if any(len(of) and bool((of == wanted).all()) for _, of in sources):
            continue
        what = one.name or "the result"
        who = ranked(ranks, pieces.view.world_size)
        return [PointedLine(one.line, f"{what} is made of {who} only", True)]
    return []


@dataclass(frozen=True)
class _Known:
    """The elements of a tensor, and of which ranks each that is not zero is a sum."""

    values: Tensor
    masks: Tensor


Sources = list[tuple[str, Tensor]]
"""Names that a line reads -> of which ranks their elements were sums."""


def _followed(pieces: Pieces, rank: int) -> Iterator[tuple[LocalTensor, Tensor, Sources]]:
    """The tensors that assignments and returns made on a rank, with those that they read."""
    sums = sums_of(pieces)
    seen = pieces.view.observed.by_rank.get(rank)
    if sums is None or seen is None:
        return
    latest: dict[tuple[str, str], _Known] = {}
    for one in seen.trace.local_tensors:
        if one.step != pieces.view.setting.step:
            continue
        masks = sums.masks_of(one.values)
        place = place_of(one.line.file, one.line.number)
        if place is not None and _makes(place, one.name):
            read = [
                (name, known)
                for name in _names_read(place)
                for (function, of), known in latest.items()
                if function == one.line.function and of.partition("[")[0] == name
            ]
            held = unpacked(one.values)
            for _, known in read:
                if _is_multiple(held, known.values):
                    masks = known.masks
            yield one, masks, [(name, known.masks) for name, known in read]
        latest[one.line.function, one.name] = _Known(unpacked(one.values), masks)


def _is_multiple(held: Tensor, of: Tensor) -> bool:
    """True if one tensor is a number times another one."""
    return len(held) == len(of) and factor_between(of, held, SAME) is not None


def _makes(place: Place, name: str) -> bool:
    """True if the statement returns a tensor, or gives this name to one."""
    statement = place.statement
    value = getattr(statement, "value", None)
    calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)] if value else []
    if any(called_name(one).startswith(FRESH) for one in calls):
        return False
    if any(functions_named(place.file, called_name(one)) for one in calls):
        return False  # the lines of that function are followed themselves
    if isinstance(statement, ast.Return):
        return not name
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    return name.partition("[")[0] in [ast.unparse(one) for one in targets]


def _names_read(place: Place) -> list[str]:
    """The variables, and attributes of ``self``, that a statement reads."""
    found: dict[str, None] = {}
    for node in inside(place.statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id != "self":
            found[node.id] = None
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found[ast.unparse(node)] = None
    if isinstance(place.statement, ast.AugAssign):
        found[ast.unparse(place.statement.target)] = None
    return list(found)
