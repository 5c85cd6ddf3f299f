"""Finds the first line after which gradients are not what right code would have made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.lines_around_reduction import way_to
from ddp_equivalence.diagnosis.lines.origins import chosen, gone_through
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.elements_left_out import elements_left_out
from ddp_equivalence.diagnosis.whereabouts.followed_values import line_of_other_values
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import SAME_WEIGHT, SPARE
from ddp_equivalence.diagnosis.whereabouts.gradient_path import Path, Station, went_alike
from ddp_equivalence.diagnosis.whereabouts.missing_reduction import why_not_reduced
from ddp_equivalence.diagnosis.whereabouts.mix_text import mix_text
from ddp_equivalence.diagnosis.whereabouts.not_sent_back import not_sent_back
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.rank_lines import lines_only_on
from ddp_equivalence.diagnosis.whereabouts.ranks_not_joined import ranks_not_joined
from ddp_equivalence.diagnosis.whereabouts.reduction_weights import (
    Wanted,
    another_factor,
    later_pieces_stay,
    other_weights,
)
from ddp_equivalence.diagnosis.whereabouts.station_text import done_text, hooks, pointed
from ddp_equivalence.diagnosis.whereabouts.unequal_passes import passes_count_unequally
from ddp_equivalence.diagnosis.whereabouts.unlike_calls import unlike_calls
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, of_all, ranked
from ddp_equivalence.measurement.calls import Kind

OTHER = "What the ranks hold in the end is not the mean of what they computed."

PRONOUN = re.compile(r"\b([Tt]hey|them)\b")

HEADLINES = {
    "reduce": "reduce leaves its result on one rank only",
    "broadcast": "the gradients of one rank are sent to all",
}

CHANGED_AFTERWARDS = "right gradients are changed afterwards"


def fault_of_reduction(pieces: Pieces, paths: Sequence[Path], wanted: Wanted) -> Whereabouts | None:
    """Where the gradients leave the right way; None if none of them does."""
    bad = [path for path in paths if not (wanted.is_met(path.held) and path.as_left)]
    if not bad:
        return None
    told = [path for path in bad if _is_known(pieces, path)] or bad
    first, unmixed = told[0], _first_without(pieces, told)
    good = next(
        (one for one in paths if one not in bad and one.rank == first.rank),
        next((one for one in paths if one not in bad), None),
    )
    found = (
        _returned(pieces, first)
        or _changed_after_it_was_right(pieces, first, wanted)
        or not_sent_back(pieces, first, [one for one in paths if one not in bad])
        or ranks_not_joined(pieces)
        or elements_left_out(pieces)
    )
    if found is None and unmixed is not None:
        first = unmixed[0]
        found = _no_mixture(pieces, told, *unmixed)
    found = (
        found
        or later_pieces_stay(pieces, first)
        or why_not_reduced(pieces, first, good)
        or passes_count_unequally(pieces, first)
        or another_factor(pieces, first, good, wanted)
        or other_weights(pieces, first, paths)
    )
    names = tuple(dict.fromkeys(name for path in bad for name in path.names))
    ranks = tuple(sorted({path.rank for path in bad}))
    where = ranked(ranks, pieces.view.world_size)
    every = pieces.view.parameters.names
    alike = [
        name for path in bad if path is first or went_alike(path, first) for name in path.names
    ]
    sentence = _with_subject(found.sentence)
    if len(alike) < len(names):
        others = len(set(alike)) - 1
        which = f"{alike[0]} and {others} more" if others else alike[0]
        sentence = f"For {which}, {sentence[:1].lower()}{sentence[1:]}"
    if len(ranks) < pieces.view.world_size and not found.ranks:
        sentence = f"On {where}, {sentence[:1].lower()}{sentence[1:]}"
    concerned = f"This concerns {of_all(names, every)} on {where}."
    if len(alike) < len(names):
        concerned = (
            f"This is said of {of_all(alike, every)} on rank {first.rank}; {len(names)} of "
            f"{len(every)} gradients are wrong, on {where}."
        )
    return Whereabouts(
        kind="reduction",
        headline=found.headline,
        sentence=f"{sentence} {concerned} {_premise(pieces, wanted)}",
        lines=found.lines,
        parameters=names,
        ranks=found.ranks or ranks,
        fix=found.fix,
    )


def _is_known(pieces: Pieces, path: Path) -> bool:
    """False if too few elements are known to say of what these gradients are a mixture."""
    elements = pieces.view.parameters.total_of(path.names)
    of_any = path.held is not None or any(one.mix is not None for one in path.stations)
    return of_any or elements >= len(pieces.all) + SPARE


def _premise(pieces: Pieces, wanted: Wanted) -> str:
    """What the big batch is of the ranks' own gradients."""
    if wanted.weight is None:
        return OTHER
    world_size = pieces.view.world_size
    what = f"{text_of(wanted.weight, '.4g')} times the sum"
    for value, name in ((1.0, "sum"), (1 / world_size, "mean")):
        if abs(wanted.weight - value) <= SAME_WEIGHT * value:
            what = f"the {name}"
    if world_size == 1:
        return "What backward computed is right, and what the rank holds in the end is not this."
    return f"The big batch is {what} of what the ranks computed before any reduction."


def _with_subject(sentence: str) -> str:
    """The sentence, in which the first pronoun for the gradients is replaced by their name."""
    found = PRONOUN.search(sentence)
    if found is None or "gradient" in sentence[: found.start()]:
        return sentence
    name = "The gradients" if found[0] == "They" else "the gradients"
    return f"{sentence[: found.start()]}{name}{sentence[found.end() :]}"


def _returned(pieces: Pieces, path: Path) -> Whereabouts | None:
    if path.as_left:
        return None
    reductions = pieces.view.observed.calls.reductions
    lines = [
        place.pointed(done_text(place.first, pieces), is_fault=True) for place in reductions[-2:]
    ]
    odd = {
        place.first.collective.reduce_op
        for place in reductions
        if place.first.collective is not None
    } - {"SUM", "AVG", ""}
    return Whereabouts(
        "reduction",
        f"gradients are reduced with {min(odd)}" if odd else "the step left tensors beside .grad",
        f"What was compared is {mix_text(path.held, pieces)}, and not what .grad held when the "
        "step ended in the second run.",
        distinct(
            [*lines, *(pointed(one, "the last change of .grad") for one in path.stations[-1:])]
        ),
    )


def _changed_after_it_was_right(pieces: Pieces, path: Path, wanted: Wanted) -> Whereabouts | None:
    met = [number for number, one in enumerate(path.stations) if wanted.is_met(one.mix)]
    if not met or met[-1] + 1 >= len(path.stations) or pieces.view.world_size == 1:
        return None
    right, wrong = path.stations[met[-1]], path.stations[met[-1] + 1]
    what, text = done_text(wrong.call, pieces), mix_text(wrong.mix, pieces)
    again = wrong.call.line == right.call.line
    return Whereabouts(
        "reduction",
        CHANGED_AFTERWARDS,
        f"They were {mix_text(right.mix, pieces)}. Then {what}, and they were {text}.",
        distinct(
            [
                pointed(right, "they are right after this line"),
                *hooks(pieces, path, wrong),
                pointed(wrong, f"{what}; now {text}", is_fault=True),
                *(_looped_over(pieces, path.rank, wrong) if again else ()),
            ]
        ),
        fix="leave the reduced gradients as they are, or change those of the big batch too.",
    )


def _looped_over(pieces: Pieces, rank: int, station: Station) -> list[PointedLine]:
    """The line that made what the loop around a line goes through."""
    view = pieces.view
    way = way_to(view, station.call)
    link = chosen(gone_through(run_lines(view, rank), way))
    if link is None or link.line == station.call.line:
        return []
    return [PointedLine(link.line, f"gives {link.name}, which the loop goes through")]


def _no_mixture(pieces: Pieces, bad: Sequence[Path], path: Path, number: int) -> Whereabouts:
    """A path's first station that is no mixture, or one of another parameter's gradients."""
    station = path.stations[number]
    unlike = unlike_calls(pieces, path)
    if unlike is not None:
        return unlike
    before = path.stations[number - 1] if number else None
    what, text = done_text(station.call, pieces), mix_text(station.mix, pieces)
    collective = station.call.collective
    headline, fix = "a line makes other numbers of the gradients", ""
    ranks: tuple[int, ...] = ()
    lines: list[PointedLine | None] = []
    if before is not None:
        lines = [pointed(before, f"they are {mix_text(before.mix, pieces)}")]
    if station.mix is not None:
        headline = "a parameter gets the gradient of another one"
        fix = "give each parameter its own part of what was reduced, in the same order."
    elif collective is not None and collective.op in HEADLINES:
        headline = HEADLINES[collective.op]
        fix = "use all_reduce."
    elif collective is not None and collective.reduce_op not in ("SUM", "AVG", ""):
        headline = f"gradients are reduced with {collective.reduce_op}"
        fix = f"use ReduceOp.SUM, and divide by {pieces.view.world_size}."
    elif collective is None and (mixed := line_of_other_values(pieces, path.rank)):
        lines = [*mixed]
    elif collective is None:
        ranks = tuple(sorted({one.rank for one in bad if _changes(one, station)}))
        lines = [*lines_only_on(pieces.view.observed.by_rank, ranks), *lines]
    where = f", on {ranked(ranks, pieces.view.world_size)}," if ranks else ""
    sentence = f"After backward they were {text}."
    if before is not None:
        first = mix_text(before.mix, pieces)
        sentence = f"First they were {first}. Then{where} {what}, and they were {text}."
    return Whereabouts(
        "reduction",
        headline,
        sentence,
        distinct(
            [
                *lines,
                *hooks(pieces, path, station),
                pointed(station, f"{what}; now {text}", is_fault=True),
            ]
        ),
        ranks=ranks,
        fix=fix,
    )


def _first_without(pieces: Pieces, bad: Sequence[Path]) -> tuple[Path, int] | None:
    """The path and the station at which a gradient first is no mixture; one before any reduction
    of the ranks comes first, since the others take theirs from it. Of too few elements it is not
    known whether they are a mixture.
    """
    found: list[tuple[bool, int, Path]] = []
    for path in bad:
        if path.held is not None and not path.held.of:
            continue  # what was no mixture for a while became one again
        is_known = pieces.view.parameters.total_of(path.names) >= len(pieces.all) + SPARE
        for number, station in enumerate(path.stations):
            if station.mix.of if station.mix is not None else is_known:
                collective = station.call.collective
                takes = collective is not None and collective.reduce_op in ("SUM", "AVG")
                found.append((takes, number, path))
                break
    if not found:
        return None
    takes, number, path = min(found, key=lambda one: (one[0], one[1]))
    return path, number


def _changes(path: Path, station: Station) -> bool:
    """True if the path's first station without a mixture is the same line's."""
    for one in path.stations:
        if one.mix is None or one.mix.of:
            return one.call.kind is Kind.CHANGE and one.call.line == station.call.line
    return False
