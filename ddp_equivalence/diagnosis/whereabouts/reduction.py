"""After which line gradients are not what right code would have made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.lines_of_wrapping import (
    groups_of,
    in_small_groups,
    lines_of_small_groups,
    lines_that_keep_from_reducing,
    names_in_small_groups,
)
from ddp_equivalence.diagnosis.lines.of_reduction import (
    lines_of_exchange,
    lines_of_hook_divisors,
    lines_of_no_sync,
    lines_that_left_out,
    way_to,
)
from ddp_equivalence.diagnosis.lines.origins import chosen, gone_through
from ddp_equivalence.diagnosis.lines.source_tree import run_lines
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.forward_faults import elements_left_out
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import (
    SAME_WEIGHT,
    SPARE,
    Mix,
    lines_only_on,
    mix_text,
    odd_ranks,
    ranks_not_joined,
)
from ddp_equivalence.diagnosis.whereabouts.gradient_path import (
    Path,
    Station,
    at,
    done_text,
    hooks,
    line_of,
    line_of_other_values,
    line_that_sums,
    not_sent_back,
    pointed,
    unlike_calls,
    went_alike,
)
from ddp_equivalence.diagnosis.whereabouts.loss import least_weight, passes_count_unequally
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    MOST_RANKS,
    Whereabouts,
    distinct,
    named,
    of_all,
    ranked,
)
from ddp_equivalence.measurement.calls import Call, Contents, Kind

# Finds the first line after which gradients are not what right code would have made of them.

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


# Gradients are a mixture of what the ranks computed, with other weights than they should have.

NOTHING = 1e-9
"""Gradients that are so many times what they should be are zero."""


@dataclass(frozen=True)
class Wanted:
    """``weight``: of each piece in what every rank should hold; None if any will do that is the
    same for all.
    """

    weight: float | None

    def is_met(self, mix: Mix | None) -> bool:
        """True if the gradients are of this mixture."""
        weight = None if mix is None or mix.of else mix.uniform
        if not weight:
            return False
        return self.weight is None or abs(weight - self.weight) <= SAME_WEIGHT * abs(self.weight)


def later_pieces_stay(pieces: Pieces, path: Path) -> Whereabouts | None:
    """Gradients of some backward passes were reduced, and those of others stayed on their rank."""
    if path.held is None or not any(piece.number for piece in pieces.all):
        return None
    most = float(path.held.weights.abs().max()) if len(path.held.weights) else 0.0
    shared: set[int] = set()
    local: set[int] = set()
    every: set[int] = set()
    for piece, weight in zip(pieces.all, path.held.weights.tolist(), strict=True):
        every.add(piece.number)
        if abs(weight) > least_weight(pieces, most):
            (local if piece.rank == path.rank else shared).add(piece.number)
    local -= shared
    lost = every - shared - local
    if not shared or not (local or lost):
        return None
    text = f"Of {len(every)} backward passes of a rank, {_numbers(shared)} reached other ranks"
    text += f", {_numbers(local)} stayed on the rank itself" if local else ""
    text += f", {_numbers(lost)} left nothing" if lost else ""
    reduced = [one for one in path.stations if _is_shared(pieces, path, one)]
    later = [
        one
        for one in path.stations
        if one.call.kind is Kind.BACKWARD and one.call.backwards in _calls_of(pieces, path, local)
    ]
    cleared = [
        one
        for one in path.stations[:-1]
        if lost and one.mix is not None and not bool(one.mix.weights.any())
    ]
    return Whereabouts(
        "reduction",
        "not every backward pass is reduced",
        f"{text}.",
        distinct(
            [
                *(pointed(one, "clears them in between", is_fault=True) for one in cleared[:1]),
                *lines_of_no_sync(pieces.view),
                *(pointed(one, _reduces_note(one, pieces), is_fault=True) for one in reduced[:1]),
                *(pointed(one, "this backward pass stays on its rank") for one in later[:1]),
            ]
        ),
        fix="reduce once, in or after the last backward pass."
        if local
        else "clear the gradients once, before the first backward pass.",
    )


def _calls_of(pieces: Pieces, path: Path, numbers: set[int]) -> set[int]:
    return {
        piece.call.backwards
        for piece in pieces.by_rank[path.rank]
        if piece.call is not None and piece.number in numbers
    }


def _numbers(numbers: set[int]) -> str:
    return "number " + ", ".join(str(one + 1) for one in sorted(numbers))


def _is_shared(pieces: Pieces, path: Path, station: Station) -> bool:
    """True if what other ranks computed is in the gradients by now."""
    if station.mix is None:
        return False
    most = float(station.mix.weights.abs().max())
    return any(
        piece.rank != path.rank and abs(weight) > SAME_WEIGHT * most
        for piece, weight in zip(pieces.all, station.mix.weights.tolist(), strict=True)
    )


def _reduces_note(station: Station, pieces: Pieces) -> str:
    if station.call.kind is Kind.BACKWARD:
        return "gradients are reduced in this backward pass"
    return done_text(station.call, pieces)


def another_factor(
    pieces: Pieces, path: Path, good: Path | None, wanted: Wanted
) -> Whereabouts | None:
    """All ranks count equally, with a wrong weight."""
    weight = None if path.held is None or path.held.of else path.held.uniform
    right = wanted.weight
    if right is None and good is not None and good.held is not None:
        right = good.held.uniform
    if weight is None or not right:
        return None
    if good is None:
        changes = [one for one in path.stations if one.call.change is not None]
        reduced = [one for one in path.stations if _is_shared(pieces, path, one)]
        lines = [
            pointed(one, done_text(one.call, pieces), is_fault=True)
            for one in (changes or reduced)[-2:]
        ]
        if not changes:
            lines = [*_hook_lines(pieces), *lines]
    else:
        lines = _where_they_part(pieces, path, good)
    headline = "all ranks count equally, with a wrong factor"
    times = text_of(weight / right, ".4g")
    sentence = f"All ranks count equally, with {times} times the right weight."
    if abs(weight / right) < NOTHING:
        headline = "gradients are zero in the end"
        sentence = "These gradients are zero in the end, and were not before."
    return Whereabouts("reduction", headline, sentence, distinct(lines))


def _hook_lines(pieces: Pieces) -> list[PointedLine]:
    """The last communication hook, with what it multiplies or divides by."""
    places = pieces.view.observed.calls.places(Kind.HOOK)[-1:]
    return [
        line
        for place in places
        for line in (
            *lines_of_hook_divisors(pieces.view, place),
            PointedLine(place.first.made_at or place.line, "this hook ran in backward"),
        )
    ]


def _where_they_part(pieces: Pieces, path: Path, good: Path) -> list[PointedLine | None]:
    """The first line at which wrong gradients part from right ones."""
    if path.rank != good.rank:
        return _where_ranks_part(pieces, path, good)
    for here, there in zip(path.stations, good.stations, strict=False):
        if line_of(here.call) != line_of(there.call):
            break
        if not _similar(here.mix, there.mix):
            text = f"{done_text(here.call, pieces)}; other gradients: {mix_text(there.mix, pieces)}"
            return [
                *hooks(pieces, path, here),
                pointed(here, f"{text}; these: {mix_text(here.mix, pieces)}", is_fault=True),
            ]
    mine = {line for line, _ in path.lines}
    theirs = {line for line, _ in good.lines}
    lines: list[PointedLine | None] = [
        pointed(one, f"{done_text(one.call, pieces)}; other gradients are not changed here", True)
        for one in path.stations
        if line_of(one.call) not in theirs
    ]
    lines += [
        pointed(one, "changes other gradients, and not these", is_fault=True)
        for one in good.stations
        if line_of(one.call) not in mine
    ]
    return lines


def _where_ranks_part(pieces: Pieces, path: Path, good: Path) -> list[PointedLine | None]:
    """The lines that changed the gradients on a rank that holds right ones, or on one that does
    not, and not on the other one.
    """
    theirs = {line for line, _ in good.lines}
    mine = {line for line, _ in path.lines}
    lines = [
        pointed(one, f"changes them on rank {good.rank}, and not on rank {path.rank}", True)
        for one in good.stations
        if line_of(one.call) not in mine
    ]
    lines += [
        pointed(one, f"on rank {path.rank} now {mix_text(one.mix, pieces)}", not lines)
        for one in path.stations
        if line_of(one.call) not in theirs
    ]
    return lines


def _similar(one: Mix | None, other: Mix | None) -> bool:
    if one is None or other is None:
        return one is other
    most = max(float(one.weights.abs().max()), float(other.weights.abs().max()))
    return float((one.weights - other.weights).abs().max()) <= SAME_WEIGHT * most


def other_weights(pieces: Pieces, path: Path, paths: Sequence[Path]) -> Whereabouts:
    """Each rank counts with another weight."""
    text = mix_text(path.held, pieces)
    lines: list[PointedLine | None] = []
    odd: tuple[int, ...] = ()
    others = [one for one in paths if set(one.names) & set(path.names)]
    for number, station in enumerate(path.stations):
        own = {
            one.rank: weight
            for one in others
            if number < len(one.stations)
            and (weight := _own_weight(pieces, one, one.stations[number])) is not None
        }
        values = own.values()
        if not own or max(values) - min(values) <= SAME_WEIGHT * max(map(abs, values)):
            continue
        odd = odd_ranks(own)
        shown = ", ".join(
            f"rank {rank} {text_of(one, '.4g')}" for rank, one in list(own.items())[:MOST_RANKS]
        )
        lines = [
            *lines_only_on(pieces.view.observed.by_rank, odd),
            *hooks(pieces, path, station),
            pointed(station, f"now times the own gradient: {shown}", is_fault=True),
        ]
        break
    lines += [pointed(one, f"now {mix_text(one.mix, pieces)}") for one in path.stations[-1:]]
    return Whereabouts(
        "reduction",
        "the ranks do not count equally",
        f"In the end they are {text}.",
        distinct(lines),
        ranks=odd,
    )


def _own_weight(pieces: Pieces, path: Path, station: Station) -> float | None:
    """The weight of the rank's own first piece."""
    if station.mix is None:
        return None
    for piece, weight in zip(pieces.all, station.mix.weights.tolist(), strict=True):
        if piece.rank == path.rank:
            return float(weight)
    return None


# Says why gradients hold what one rank, or some ranks, computed, and not what all did.


def why_not_reduced(pieces: Pieces, path: Path, good: Path | None) -> Whereabouts | None:
    """Which ranks are missing, and which call lacks them; None if all ranks count."""
    if path.held is None or path.held.of or pieces.view.world_size == 1:
        return None
    most = float(path.held.weights.abs().max()) if len(path.held.weights) else 0.0
    counted = {
        piece.rank
        for piece, weight in zip(pieces.all, path.held.weights.tolist(), strict=True)
        if abs(weight) > least_weight(pieces, most)
    }
    missing = [rank for rank in range(pieces.view.world_size) if rank not in counted]
    if not missing or not counted:
        return None
    return (
        _fewer_calls(pieces, path)
        or _not_in_any(pieces, path, good)
        or _copy_not_written_back(pieces, path)
        or _other_group(pieces, path, missing)
        or _plain(pieces, path, good, counted)
    )


def _about(call: Call, path: Path) -> bool:
    collective = call.collective
    return (
        collective is not None
        and reduces_gradients(call)
        and bool(set(collective.names) & set(path.names))
    )


def _reductions_of(pieces: Pieces, path: Path, rank: int) -> list[Call]:
    return [call for call in pieces.view.observed.calls.of(rank) if _about(call, path)]


def _fewer_calls(pieces: Pieces, path: Path) -> Whereabouts | None:
    """The rank reduced these gradients less often than another one."""
    calls = pieces.view.observed.calls
    counts = {
        rank: len(_reductions_of(pieces, path, rank)) for rank in range(pieces.view.world_size)
    }
    few, many = min(counts.values()), max(counts.values())
    if few == many:
        return None
    ranks = [rank for rank, count in counts.items() if count == few]
    last = next((line_of(one) for one in reversed(calls.of(ranks[0])) if line_of(one)), None)
    there = next(rank for rank, count in counts.items() if count == many)
    line = next(line_of(one) for one in _reductions_of(pieces, path, there))
    who = ranked(ranks, pieces.view.world_size)
    return Whereabouts(
        "reduction",
        f"{who} took part in fewer reductions",
        f"{who[:1].upper()}{who[1:]} reduced them in {few} calls, and other ranks in up to {many}.",
        distinct(
            [
                at(last, f"the last recorded call of {who}", is_fault=True),
                *_group_without(pieces, _reductions_of(pieces, path, there)[0], ranks),
                at(line, f"reduces them, but not on {who}"),
            ]
        ),
        fix="make the same collectives on all ranks.",
    )


def _group_without(pieces: Pieces, call: Call, ranks: list[int]) -> list[PointedLine]:
    """The line that made the group of a collective, if it lacks these ranks."""
    if call.collective is None or set(ranks) & set(call.collective.ranks):
        return []
    group = set(call.collective.ranks)
    made = pieces.view.observed.calls.places(
        Kind.NEW_GROUP, where=lambda one: set(one.ranks) == group
    )
    who = ranked(ranks, pieces.view.world_size)
    return [one.pointed(f"makes a group without {who}", is_fault=True) for one in made[:1]]


def _not_in_any(pieces: Pieces, path: Path, good: Path | None) -> Whereabouts | None:
    """Other gradients were reduced by a line that did not contain these."""
    calls = pieces.view.observed.calls
    if good is None or _reductions_of(pieces, path, path.rank):
        return None
    reducing = [one for one in calls.reductions if path.rank in one.by_rank]
    if not reducing:
        return None
    place = reducing[-1]
    decided = lines_that_left_out(pieces.view, place)
    return Whereabouts(
        "reduction",
        "some gradients are in no reduction",
        f"No reduction contained them: they are {mix_text(path.held, pieces)}.",
        distinct(
            [
                *decided,
                place.pointed(f"reduces others, not {named(path.names)}", is_fault=True),
            ]
        ),
        fix="reduce these gradients too.",
    )


def _copy_not_written_back(pieces: Pieces, path: Path) -> Whereabouts | None:
    """A copy of these gradients was reduced, and .grad was not changed afterwards."""
    calls = pieces.view.observed.calls
    copies = [
        call
        for call in _reductions_of(pieces, path, path.rank)
        if call.collective is not None
        and call.collective.contents is Contents.COPIES_OF_GRADIENTS
        and not call.in_backward
    ]
    order = calls.of(path.rank)
    last = path.stations[-1].call if path.stations else None
    if not copies or (last is not None and order.index(last) > order.index(copies[-1])):
        return None
    line = line_of(copies[-1])
    return Whereabouts(
        "reduction",
        "the reduced copy is not written back",
        f"A copy of them was reduced, and .grad was not written afterwards: they are "
        f"{mix_text(path.held, pieces)}.",
        distinct([at(line, "reduces a copy", True, "copy the result back to .grad")]),
        fix="after this line, copy the reduced values back into each .grad.",
    )


def _other_group(pieces: Pieces, path: Path, missing: list[int]) -> Whereabouts | None:
    """The reductions were over some ranks only."""
    calls = [
        call
        for call in _reductions_of(pieces, path, path.rank)
        if call.collective is not None
        and len(call.collective.ranks) < pieces.view.world_size
        and not set(missing) <= set(call.collective.ranks)
    ]
    if not calls or calls[-1].collective is None:
        return None
    group = ranked(calls[-1].collective.ranks, pieces.view.world_size)
    made = pieces.view.observed.calls.places(
        Kind.NEW_GROUP,
        where=lambda call: set(call.ranks) == set(calls[-1].collective.ranks),  # type: ignore[union-attr]
    )
    return Whereabouts(
        "reduction",
        "gradients are reduced over some ranks only",
        f"They were reduced over {group}, and never with "
        f"{ranked(missing, pieces.view.world_size)}.",
        distinct(
            [
                *(one.pointed("makes the group") for one in made[:1]),
                at(line_of(calls[-1]), f"reduces over {group}", is_fault=True),
            ]
        ),
        fix=f"reduce over all {pieces.view.world_size} ranks.",
    )


def _plain(pieces: Pieces, path: Path, good: Path | None, counted: set[int]) -> Whereabouts:
    """What they hold in the end, and the last call before."""
    reduced = _reductions_of(pieces, path, path.rank)
    text = mix_text(path.held, pieces)
    stations = path.stations[-2:]
    sent = any(
        one.op == "send"
        for seen in pieces.view.observed.by_rank.values()
        for one in seen.collectives or ()
    )
    exchanged = lines_of_exchange(pieces.view, path.rank) if sent else []
    if not exchanged and not reduced and len(counted) > 1:
        exchanged = line_that_sums(pieces, path.rank, sorted(counted))
    lines: list[PointedLine | None] = [*exchanged]
    if not reduced and not exchanged:
        lines += lines_that_keep_from_reducing(pieces.view)
    lines += [
        at(
            line_of(one.call),
            f"after it: {mix_text(one.mix, pieces)}",
            is_fault=one is stations[-1] and not exchanged,
        )
        for one in stations
    ]
    others = [place for place in _elsewhere(pieces, path) if not reduced]
    lines += [one.pointed("a collective of something else") for one in others[-1:]]
    never = "" if reduced else "No collective that Python issued contained them. "
    if sent:
        never += "Ranks sent each other tensors point to point, which is not followed. "
    return Whereabouts(
        "reduction",
        "gradients of some ranks are missing",
        f"{never}In the end they are {text}.",
        distinct(lines),
        fix="" if reduced or sent else "reduce the gradients over all ranks after backward.",
    )


def _elsewhere(pieces: Pieces, path: Path) -> list[CallSite]:
    return pieces.view.observed.calls.places(
        Kind.COLLECTIVE, where=lambda call: not _about(call, path)
    )


# Only some parameters differ: those that a wrapper reduces in a group of only some ranks.


def fault_of_small_groups(view: View) -> Whereabouts | None:
    """Which call gave the parameters that differ, and only these, a group without all ranks."""
    wrong = view.measured.differing
    in_small = names_in_small_groups(view)
    if not wrong or wrong != in_small or len(wrong) == len(view.parameters.names):
        return None  # what is right in such a group was reduced between the groups as well
    names = tuple(name for name in view.parameters.names if name in wrong)
    places = [place for place in in_small_groups(view) if wrong & set(place.names)]
    where = groups_text(tuple(sorted({one for place in places for one in groups_of(place)})))
    what = " and ".join(dict.fromkeys(place.first.what for place in places))
    return Whereabouts(
        "reduction",
        "some parameters are reduced in smaller groups",
        f"{what} was given {named(names)} with {where}, not with all {view.world_size} ranks. All "
        "other parameters are right.",
        distinct(lines_of_small_groups(view, names)),
        names,
        tuple(range(view.world_size)),
        fix=f"give {named(names)} the mesh or group of all {view.world_size} ranks.",
    )
