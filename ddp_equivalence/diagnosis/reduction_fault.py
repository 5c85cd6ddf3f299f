"""Finds the first line after which gradients are not what right code would have made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_equivalence.diagnosis.gradient_mix import SAME_WEIGHT, Mix
from ddp_equivalence.diagnosis.gradient_path import Path, Station, line_of
from ddp_equivalence.diagnosis.missing_reduction import why_not_reduced
from ddp_equivalence.diagnosis.mix_text import mix_text
from ddp_equivalence.diagnosis.pieces import Pieces
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import reduces_gradients
from ddp_equivalence.diagnosis.whereabouts import Whereabouts, distinct, of_all, ranked
from ddp_equivalence.measurement.calls import Call, Kind


@dataclass(frozen=True)
class Wanted:
    """``weight``: of each piece in what every rank should hold; None if any will do that is the
    same for all.
    """

    weight: float | None

    def is_met(self, mix: Mix | None) -> bool:
        """True if the gradients are of this mixture."""
        weight = None if mix is None or mix.of else mix.uniform
        if weight is None or not weight:
            return False
        return self.weight is None or abs(weight - self.weight) <= SAME_WEIGHT * abs(self.weight)


def fault_of_reduction(
    pieces: Pieces, paths: Sequence[Path], wanted: Wanted
) -> Whereabouts | None:
    """Where the gradients leave the right way; None if none of them does."""
    bad = [path for path in paths if not (wanted.is_met(path.held) and path.as_left)]
    if not bad:
        return None
    first = bad[0]
    good = next(
        (one for one in paths if one not in bad and one.rank == first.rank),
        next((one for one in paths if one not in bad), None),
    )
    found = (
        _returned(pieces, first)
        or _changed_after_it_was_right(pieces, first, wanted)
        or _no_mixture(pieces, first)
        or _later_pieces_stay(pieces, first)
        or why_not_reduced(pieces, first, good)
        or _another_factor(pieces, first, good, wanted)
        or _other_weights(pieces, first)
    )
    alike = [path for path in bad if path.lines == first.lines]
    names = tuple(dict.fromkeys(name for path in alike for name in path.names))
    ranks = tuple(sorted({path.rank for path in bad}))
    text = of_all(names, pieces.view.parameters.names)
    where = ranked(ranks, pieces.view.world_size)
    return Whereabouts(
        kind="reduction",
        headline=found.headline,
        sentence=f"The ranks' own gradients are reduced wrongly. {found.sentence} "
        f"This concerns {text} on {where}.",
        lines=found.lines,
        parameters=names,
        ranks=ranks,
        fix=found.fix,
    )


def _returned(pieces: Pieces, path: Path) -> Whereabouts | None:
    if path.as_left:
        return None
    text = mix_text(path.held, pieces)
    return Whereabouts(
        "reduction",
        "the step left other tensors than .grad",
        f"What was compared is {text}, and not what .grad held when the step ended.",
        distinct([_pointed(one, "changes .grad") for one in path.stations[-1:]]),
    )


def _changed_after_it_was_right(
    pieces: Pieces, path: Path, wanted: Wanted
) -> Whereabouts | None:
    met = [number for number, one in enumerate(path.stations) if wanted.is_met(one.mix)]
    if wanted.weight is None:  # then a gradient that is not scaled yet would count as right
        reduced = [n for n in met if pieces.view.world_size > 1]
        met = reduced[-1:]
    if not met or met[-1] + 1 >= len(path.stations):
        return None
    right, wrong = path.stations[met[-1]], path.stations[met[-1] + 1]
    text = mix_text(wrong.mix, pieces)
    what = done_text(wrong.call, pieces)
    return Whereabouts(
        "reduction",
        "right gradients are changed afterwards",
        f"They were reduced rightly, and then {what}: they are {text} after this.",
        distinct(
            [
                _pointed(right, "the gradients are right after this line"),
                _pointed(wrong, f"{what}", is_fault=True),
            ]
        ),
        fix="leave the gradients as they are after this reduction, or change the big batch too.",
    )


def _no_mixture(pieces: Pieces, path: Path) -> Whereabouts | None:
    """The first station that is no mixture, or one of another parameter's gradients."""
    for number, station in enumerate(path.stations):
        if station.mix is not None and not station.mix.of:
            continue
        what = done_text(station.call, pieces)
        text = mix_text(station.mix, pieces)
        headline = "a line makes other numbers of the gradients"
        collective = station.call.collective
        fix = ""
        if station.mix is not None:
            headline = "a parameter gets the gradient of another one"
            fix = "give each parameter its own part of what was reduced, in the same order."
        elif collective is not None and collective.reduce_op not in ("SUM", "AVG", ""):
            headline = f"gradients are reduced with {collective.reduce_op}"
            fix = "use ReduceOp.SUM, and divide by the world size."
        before = path.stations[number - 1] if number else None
        return Whereabouts(
            "reduction",
            headline,
            f"After one line, {what}, they are {text}.",
            distinct(
                [
                    *_hooks(pieces, path, station),
                    before and _pointed(before, f"after it: {mix_text(before.mix, pieces)}"),
                    _pointed(station, f"{what}; after it: {text}", is_fault=True),
                ]
            ),
            fix=fix,
        )
    return None


def _later_pieces_stay(pieces: Pieces, path: Path) -> Whereabouts | None:
    """Gradients of some backward passes were reduced, and those of others stayed on their rank."""
    if path.held is None or not any(piece.number for piece in pieces.all):
        return None
    by_number: dict[int, list[tuple[int, float]]] = {}
    for piece, weight in zip(pieces.all, path.held.weights.tolist(), strict=True):
        by_number.setdefault(piece.number, []).append((piece.rank, weight))
    most = float(path.held.weights.abs().max())

    def reaches(pairs: list[tuple[int, float]], others: bool) -> bool:
        return any(
            abs(weight) > SAME_WEIGHT * most and (rank != path.rank) is others
            for rank, weight in pairs
        )

    shared = [number for number, pairs in by_number.items() if reaches(pairs, True)]
    local = [n for n, pairs in by_number.items() if n not in shared and reaches(pairs, False)]
    lost = [n for n in by_number if n not in shared and n not in local]
    if not shared or not (local or lost):
        return None
    total = len(by_number)
    parts = [f"of {total} backward passes, {_numbers(shared)} {_are(shared)} in what others hold"]
    parts += [f"{_numbers(local)} {_stay(local)} on the rank itself"] if local else []
    parts += [f"{_numbers(lost)} {_are(lost)} lost"] if lost else []
    reduced = [one for one in path.stations if one.mix is not None and _is_shared(one, path.rank)]
    first = reduced[:1] or path.stations[:1]
    pointed = [_pointed(one, _reduces_note(one, pieces), is_fault=True) for one in first]
    switch = pieces.view.observed.calls.places(Kind.NO_SYNC)
    return Whereabouts(
        "reduction",
        "not every backward pass is reduced",
        f"{'; '.join(parts)[:1].upper()}{'; '.join(parts)[1:]}.",
        distinct([*(one.pointed("no synchronisation inside") for one in switch[:1]), *pointed]),
        fix="reduce once, in or after the last backward pass.",
    )


def _is_shared(station: Station, rank: int) -> bool:
    return station.mix is not None and bool((station.mix.weights != 0).sum() > 1)


def _reduces_note(station: Station, pieces: Pieces) -> str:
    if station.call.kind is Kind.BACKWARD:
        return f"backward pass {station.call.backwards + 1}: reduced in it"
    return done_text(station.call, pieces)


def _another_factor(
    pieces: Pieces, path: Path, good: Path | None, wanted: Wanted
) -> Whereabouts | None:
    """All ranks count equally, with a wrong weight."""
    weight = None if path.held is None or path.held.of else path.held.uniform
    if weight is None:
        return None
    right = wanted.weight
    if right is None and good is not None and good.held is not None:
        right = good.held.uniform
    if not right:
        return None
    known = set() if good is None else {line for line, _ in good.lines}
    odd = [
        one
        for one in path.stations
        if one.call.change is not None and line_of(one.call) not in known
    ]
    changes = odd or [one for one in path.stations if one.call.change is not None]
    absent = [one for one in good.stations if line_of(one.call) not in dict(path.lines)] if (
        good
    ) else []
    lines = [*_hooks(pieces, path, path.stations[0] if path.stations else None)]
    lines += [_pointed(one, done_text(one.call, pieces), is_fault=True) for one in changes[-2:]]
    if not changes:
        lines += [
            _pointed(one, "changes other gradients, not these", is_fault=True) for one in absent[:1]
        ]
        lines += [_pointed(one, done_text(one.call, pieces)) for one in path.stations[-1:]]
    return Whereabouts(
        "reduction",
        "all ranks count equally, with a wrong factor",
        f"All ranks count equally, but the result is {weight / right:.4g} times what it should be.",
        distinct(lines),
    )


def _other_weights(pieces: Pieces, path: Path) -> Whereabouts:
    text = mix_text(path.held, pieces)
    stations = path.stations[-2:]
    return Whereabouts(
        "reduction",
        "the ranks do not count equally",
        f"In the end they are {text}.",
        distinct([_pointed(one, f"after it: {mix_text(one.mix, pieces)}") for one in stations]),
    )


def _hooks(pieces: Pieces, path: Path, station: Station | None) -> list[PointedLine]:
    """The lines that registered hooks, if the station is a backward pass."""
    if station is None or station.call.kind is not Kind.BACKWARD:
        return []
    places = pieces.view.observed.calls.places(
        Kind.HOOK, where=lambda call: not call.names or bool(set(call.names) & set(path.names))
    )
    return [place.pointed(f"{place.first.what}: runs in backward") for place in places[-1:]]


def done_text(call: Call, pieces: Pieces) -> str:
    """What a call does to gradients, as a clause."""
    if call.kind is Kind.BACKWARD:
        return "backward changes them"
    if call.collective is not None:
        operation = f" with {call.collective.reduce_op}" if call.collective.reduce_op else ""
        group = ranked(call.collective.ranks, pieces.view.world_size)
        verb = "reduces" if reduces_gradients(call) else "exchanges"
        return f"{call.collective.op}{operation} {verb} them over {group}"
    change = call.change
    if change is None:
        return f"{call.kind.value} changes them"
    if change.cleared:
        return "a line clears them"
    if change.factor is not None:
        return f"a line multiplies them by {change.factor:.6g}"
    return "a line changes them otherwise than by a factor"


def _pointed(station: Station, note: str, is_fault: bool = False) -> PointedLine | None:
    line = line_of(station.call)
    return None if line is None else PointedLine(line, note, is_fault)


def _numbers(numbers: Sequence[int]) -> str:
    return "number " + ", ".join(str(one + 1) for one in numbers)


def _are(numbers: Sequence[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def _stay(numbers: Sequence[int]) -> str:
    return "stays" if len(numbers) == 1 else "stay"
