"""What a name that a line reads held on the ranks, beside what it held on one rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Literal

import torch

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.source import place_at
from ddp_equivalence.diagnosis.setting import PointedLine, Reading
from ddp_equivalence.diagnosis.where.whereabouts import MOST_RANKS, ranked
from ddp_equivalence.measurement.calls import Held, NameAt, Value
from ddp_equivalence.measurement.measure import OneRank

MEAN = 1e-6
"""A mean of numbers of the ranks, in float32 as well, differs by less from that of one rank."""

ROUNDING = 1e-12
"""Numbers that differ by less, relative to the larger one, are the same."""


@dataclass(frozen=True)
class Told:
    """What a name held, as a clause. ``how``: all ranks held what one rank held; or each its part
    of that, which is right where all parts are used; or something else.
    """

    text: str
    how: Literal["same", "part", "other"]


SAME = Told("", "same")


@dataclass(frozen=True)
class Names:
    """``by_rank``: what names held on each rank, the lowest first; ``alone``: on one rank."""

    by_rank: Sequence[Mapping[NameAt, tuple[Held, ...]]] = ()
    alone: Mapping[NameAt, tuple[Held, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: OneRank) -> Names:
        """Those of the recorded runs."""
        return cls([runs.by_rank[rank].names for rank in sorted(runs.by_rank)], runs.alone.names)

    def told(self, lines: Sequence[PointedLine]) -> Iterator[PointedLine]:
        """The lines that set what another one reads, with what this was seen to hold; without those
        that set what is right on all ranks: the same as on one rank, or each rank's part of it.
        """
        for one in lines:
            is_open = one.reads is None or one.is_fault or _is_set_later(one)
            held = None if one.reads is None or is_open else self.held(one.reads)
            if held is None:
                yield one
            elif held.how == "other" or (held.how == "part" and one.reads and one.reads.passed):
                yield replace(one, note=held.text)

    def is_right(self, reading: Reading) -> bool:
        """True if what is read is right on all ranks. What is passed to a function that should be
        given all of it is not right if each rank has its part.
        """
        held, passed = self.held(reading), reading.passed
        return held is not None and (held.how == "same" or (held.how == "part" and not passed))

    def held(self, reading: Reading) -> Told | None:
        """What the name held when the reader's function ended; None if it is not known."""
        name, reader = reading.name, reading.reader
        place = place_at(reader)
        if place is None or place.function is None or len(self.by_rank) < 2:
            return None
        decorators = [one.lineno for one in place.function.decorator_list]
        at = NameAt(reader.file, min([place.function.lineno, *decorators]), name)
        alone, by_rank = self.alone.get(at), [one.get(at) for one in self.by_rank]
        if not alone or any(one is None or len(one) != len(alone) for one in by_rank):
            return None
        calls = [list(map(_leaves, of)) for of in zip(alone, *filter(None, by_rank), strict=True)]
        found = [one for held in calls for one in _told(name, held)]
        others = [one for one in found if one is not None and one.how == "other"]
        if others or None in found:
            return others[-1] if others else None
        return next((one for one in found if one is not None and one.how == "part"), SAME)


def _is_set_later(line: PointedLine) -> bool:
    """True if a later line sets the name again, or writes to its tensor: in the end it held what
    that one gave it.
    """
    place = place_at(line.line)
    function = None if place is None else place.function
    name = "" if line.reads is None else line.reads.name
    if function is None:
        return False
    later = [one for one in ast.walk(function) if getattr(one, "lineno", 0) > line.line.number]
    # What a call returns is not used where it stands alone, so it has written to something.
    alone = [one.value for one in later if isinstance(one, ast.Expr)]
    given = [list(ast.walk(part)) for one in alone for part in ast.iter_child_nodes(one)]
    # What is given to a call inside it is not: in `loss(rows).backward()`, `rows` is only read.
    read = [part for part in given if any(isinstance(one, ast.Call) for one in part)]
    written = [node for part in given if part not in read for node in part]
    stored = [one for one in later if isinstance(getattr(one, "ctx", None), ast.Store)]
    named = (one for one in (*stored, *written) if isinstance(one, ast.Name | ast.Attribute))
    return any(ast.unparse(one) == name for one in named)


def _leaves(held: Held, path: str = "") -> dict[str, Held]:
    """What a list or a dictionary holds, by where it is in it."""
    if not isinstance(held, tuple):
        return {path: held}
    parts = [_leaves(one, f"{path}[{key}]") for key, one in held]
    return {at: one for part in parts for at, one in part.items()}


def _told(name: str, held: Sequence[Mapping[str, Held]]) -> Iterator[Told | None]:
    """The same of each number and tensor. ``held``: on one rank, and then on each rank."""
    if any(one.keys() != held[0].keys() for one in held):
        yield None
        return
    for at in held[0]:
        each = [one[at] for one in held]
        if ... in each:
            yield None
        elif any(one != each[0] for one in each):
            numbers = [one for one in map(_number, each) if one is not None]
            if len(numbers) == len(each):
                yield _of_numbers(f"{name}{at}", numbers[1:], numbers[0], each[0])
            else:
                part = Told(f"{name}{at} is each rank's own part", "part")
                own = Told(f"{name}{at} is each rank's own, and one rank has the mean", "other")
                is_own = _have_the_mean(each[0], each[1:])
                yield part if _are_parts(each[0], each[1:]) else own if is_own else None


def _of_numbers(name: str, by_rank: Sequence[float], alone: float, held: Held) -> Told:
    is_number_of_ranks = alone == 1 and set(by_rank) == {len(by_rank)}
    if is_number_of_ranks or all(isclose(one, alone, rel_tol=ROUNDING) for one in by_rank):
        return SAME
    is_whole = isinstance(held, int) or (isinstance(held, Value) and not held.is_floating_point)
    mean = sum(by_rank) / len(by_rank)
    is_mean = not is_whole and alone != 0 and isclose(mean, alone, rel_tol=MEAN)
    are_equal = len(set(by_rank)) == 1 and isclose(sum(by_rank), alone, rel_tol=ROUNDING)
    return Told(_in_words(name, by_rank, alone), "part" if is_mean or are_equal else "other")


def _are_parts(alone: Held, by_rank: Sequence[Held]) -> bool:
    """True if the ranks held the parts of what one rank held, in their order."""
    if not isinstance(alone, Value) or not alone.shape:
        return False
    parts = [one.tensor for one in by_rank if isinstance(one, Value) and one.shape]
    is_of_parts = len(parts) == len(by_rank) and len({one.shape[1:] for one in parts}) == 1
    return is_of_parts and torch.equal(torch.cat(parts), alone.tensor)


def _have_the_mean(alone: Held, by_rank: Sequence[Held]) -> bool:
    """True if one rank held the mean of what the ranks held."""
    if not isinstance(alone, Value) or not alone.is_floating_point:
        return False
    tensors = [one.tensor for one in by_rank if isinstance(one, Value) and one.shape == alone.shape]
    if len(tensors) < len(by_rank) or not alone.tensor.any():
        return False
    return torch.allclose(torch.stack(tensors).mean(0), alone.tensor, rtol=MEAN, atol=0)


def _number(held: Held) -> float | None:
    if isinstance(held, Value):
        return float(held.tensor) if held.tensor.numel() == 1 else None
    return float(held) if isinstance(held, bool | int | float) else None


def _in_words(name: str, by_rank: Sequence[float], alone: float) -> str:
    """``n is 3 on rank 0, 5 on rank 1, and 8 on one rank``."""
    ranks: dict[str, list[int]] = {}
    for rank, number in enumerate(by_rank):
        ranks.setdefault(text_of(number, ".4g"), []).append(rank)
    shown = list(ranks.items())[:MOST_RANKS]
    each = ", ".join(f"{text} on {ranked(of, len(by_rank))}" for text, of in shown)
    return f"{name} is {each}, and {text_of(alone, '.4g')} on one rank"
