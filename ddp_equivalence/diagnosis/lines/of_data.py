"""The lines that decide which examples each rank reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.examples_read import (
    example_numbers,
    read_by_no_rank,
    read_more_than_once,
    short_numbers,
)
from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.origins import Choice, choices, given_at, set_at
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.lines.words import last_of
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Contents, Kind


def samplers(view: View) -> list[CallSite]:
    """The lines that made a DistributedSampler."""
    return view.observed.calls.places(Kind.SAMPLER)


def loaders(view: View) -> list[CallSite]:
    """The lines that made a DataLoader."""
    return view.observed.calls.places(Kind.LOADER)


def data_collectives(view: View) -> list[CallSite]:
    """The lines that exchanged other tensors than those of the model before the first forward."""
    return view.observed.calls.collectives(
        lambda call, of: (
            call.backwards == 0
            and not call.in_backward
            and of.contents is Contents.OTHER
            and of.elements > 1
        )
    )


def reads(view: View) -> list[CallSite]:
    """The lines that first held what the model was called with."""
    return view.observed.calls.places(Kind.READ)


def read_at(view: View, place: CallSite, rank: int) -> list[int]:
    """The examples of this step that a rank read at this place, in their order."""
    first = view.setting.first_example
    return [one - first for call in place.by_rank.get(rank, ()) for one in call.examples]


def left_over(place: CallSite, drops: bool) -> int:
    """How many examples the samplers of this line drop, or pad the data set by, to share it."""
    length, ranks = int(place.first.value or 0), number_of(place, "num_replicas")
    if not ranks or bool(number_of(place, "drop_last")) is not drops:
        return 0
    return length % ranks if drops else -length % ranks


def number_of(place: CallSite, argument: str) -> int:
    """What a sampler or loader was given for this argument; 0 if it is not known."""
    return int(dict(place.first.numbers).get(argument, 0))


def what_was_read(view: View, place: CallSite, ranks: Sequence[int] = ()) -> str:
    """The examples that each rank read at this place; "" if they are not known.

    ``ranks``: only these of the ranks that read here; () for all.
    """
    readers = [rank for rank in place.ranks if rank in (ranks or place.ranks)]
    read = [sorted(set(read_at(view, place, rank))) for rank in readers[:MOST_READERS]]
    shown = [
        f"rank {rank} reads {short_numbers(examples)}"
        for rank, examples in zip(readers, read, strict=False)
    ]
    return "; ".join([*shown, *(["..."] if readers[MOST_READERS:] else [])]) if all(read) else ""


def lines_of_reading(
    view: View,
    chosen: Sequence[PointedLine] = (),
    ranks: Sequence[int] = (),
    note: str = "",
) -> list[PointedLine]:
    """The lines that choose what is read, and the last one where it is read.

    ``chosen``: those that are known; without them, what ``lines_that_choose`` finds. ``ranks``:
    those that read wrongly. ``note``: on the line that reads, instead of what each rank reads.
    """
    chosen = (chosen or lines_that_choose(view, ranks))[:MOST_SHARING]
    faults = {_place_in_file(one.line): one for one in chosen}
    lines = list(chosen)
    for place in [one for one in reads(view) if set(ranks or one.ranks) & set(one.ranks)][-1:]:
        text, known = (
            note or what_was_read(view, place, ranks),
            faults.get(_place_in_file(place.line)),
        )
        if known is None:
            is_fault = not any(one.is_fault for one in chosen)
            return [*lines, place.pointed(text, is_fault=is_fault)]
        lines[lines.index(known)] = replace(known, note=known.note or text)
    return lines


def lines_that_choose(view: View, ranks: Sequence[int] = ()) -> list[PointedLine]:
    """The line that gave a sampler a wrong number, the first list of positions that has what was
    read again, or lacks what was not read, or the lines that choose a rank's share.
    """
    repeated, unread = read_more_than_once(view), read_by_no_rank(view)
    listed = line_that_repeats(view, repeated) if repeated else line_that_drops(view, unread)
    return lines_of_wrong_samplers(view) or listed or lines_that_share(view, ranks)


def line_that_repeats(view: View, repeated: Sequence[int]) -> list[PointedLine]:
    """The first line whose list of whole numbers holds just these examples more than once."""
    note = f"holds {example_numbers(repeated, most=4)} more than once"
    return _first_list(view, lambda times: {one for one in times if times[one] > 1}, repeated, note)


def line_that_drops(view: View, dropped: Sequence[int]) -> list[PointedLine]:
    """The first line whose list of whole numbers holds all examples but these."""
    every = set(range(view.setting.example_count))
    note = f"lacks {example_numbers(dropped, most=4)}"
    return _first_list(view, lambda times: every - set(times), dropped, note)


def _first_list(
    view: View,
    chosen: Callable[[Counter[int]], set[int]],
    examples: Sequence[int],
    note: str,
) -> list[PointedLine]:
    """The first line whose list has just these examples chosen, after one that held every example
    once: a list of other things than examples may look like the former, but hardly like both.
    """
    calls, first = view.observed.calls, view.setting.first_example
    every, was_whole = set(range(view.setting.example_count)), False
    for call in calls.of(min(calls.by_rank, default=0)):
        line = call.at
        times = Counter(one - first for one in call.examples)
        if call.kind is not Kind.INDICES or line is None or not set(times) <= every:
            continue
        if set(times) == every and max(times.values()) == 1:
            was_whole = True
        elif was_whole and examples and chosen(times) == set(examples):
            return [PointedLine(line, f"{call.what} {note}", True)]
    return []


# The lines that choose which of all examples a rank reads.

MOST_READERS = 3

MOST_SHARING = 2
"""So many lines are shown: of the three that fit, one is where the rows are read."""

FEWEST = 2
"""Shorter lists of positions may be a list of something else."""

NEAR = 1
"""To see the rank, names must be looked up so often more than in the line that is nearest to it."""

MOST_NAMES = 2
MOST_ENTRIES = 4


def lines_that_share(view: View, ranks: Sequence[int] = ()) -> list[PointedLine]:
    """The line that first held the positions of just what each rank reads, and those that choose
    with numbers of the rank what the model was called with; not where rows are read.

    ``ranks``: those that read wrongly. What cuts the end off is no matter of ranks: if only the
    last examples are missing, a line that chooses without the rank comes first.
    """
    rank = next(iter(ranks), min(view.observed.by_rank, default=0))
    listed = _line_of_positions(view, rank)
    lines = [*(place.line for place in reads(view)), *(one.line for one in listed)]
    known = {_place_in_file(line) for line in lines}
    choosing = [one for one in _choices(view, rank) if _place_in_file(one.line) not in known]
    unread, count = read_by_no_rank(view), view.setting.example_count
    others = [one for one in choosing if one.distance is None] if unread else []
    sharing = _clearest(choosing)
    if unread == list(range(count - len(unread), count)) and not read_more_than_once(view):
        sharing = [*others[:1], *sharing]
    if not (listed or sharing):
        sharing = others
    return [*listed, *map(_pointed, sharing)][:MOST_SHARING]


def _place_in_file(line: CodeLine) -> tuple[str, int]:
    """A comprehension may be a function of its own, on the same line."""
    return line.file, line.number


def _pointed(choice: Choice) -> PointedLine:
    names = list(choice.names[:MOST_NAMES])
    return PointedLine(choice.line, f"uses {' and '.join(names)}" if names else "", True)


def _clearest(choosing: Sequence[Choice]) -> list[Choice]:
    """The first ones from which it is not far to the rank; one of them names it, if any does."""
    of_rank = [(one.distance, one) for one in choosing if one.distance is not None]
    least = min((distance for distance, _ in of_rank), default=0)
    near = [one for distance, one in of_rank if distance <= least + NEAR]
    near = [one for one in near if one.computes] or near
    first = near[:MOST_SHARING]
    direct = [one for one in near if not one.distance]
    if direct and not any(one in direct for one in first):
        first[-1:] = direct[:1]
    return first


def _line_of_positions(view: View, rank: int) -> list[PointedLine]:
    """The first line at which each rank had a list of the positions that it read, and no others."""
    by_rank = {one: _first_list_of_read(view, one) for one in view.observed.by_rank}
    found = [call for call in by_rank.values() if call is not None]
    lines = {call.at for call in found}
    if len(found) < len(by_rank) or len(lines) != 1 or None in lines:
        return []
    called = by_rank[rank]
    assert called is not None
    same = [one for one, call in by_rank.items() if call and call.examples == called.examples]
    first = view.setting.first_example
    numbers = short_numbers([one - first for one in called.examples], MOST_ENTRIES)
    note = f"{called.what} is {numbers} on {ranks_by_number(same)}"
    line = called.at
    assert line is not None
    return [PointedLine(line, note, True)]


def _first_list_of_read(view: View, rank: int) -> Call | None:
    parts = (view.observed.examples_read or {rank: ()})[rank]
    first = view.setting.first_example
    read = sorted(first + one for part in parts for one in part)
    if len(read) < FEWEST or len(set(read)) >= view.setting.example_count:
        return None
    calls = view.observed.calls.of(rank)
    return next(
        (one for one in calls if one.kind is Kind.INDICES and sorted(one.examples) == read), None
    )


def _choices(view: View, rank: int) -> list[Choice]:
    """The lines on the way to what the model was called with that choose what it holds."""
    run, found = run_lines(view, rank), dict[CodeLine, Choice]()
    for place in (*reads(view), *view.observed.calls.places(Kind.FORWARD)):
        for one in choices(run, place.line) if rank in place.by_rank else ():
            found.setdefault(one.line, one)
    return list(found.values())


# Samplers of torch that were given another number of ranks, or another rank, than they run on.

SAMPLER = "DistributedSampler"
ARGUMENTS = ("dataset", "num_replicas", "rank")


def lines_of_wrong_samplers(view: View) -> list[PointedLine]:
    """The line that made a sampler with a wrong number of ranks, or with one rank on several, and
    the line that made this number.
    """
    found: list[PointedLine] = []
    for place in samplers(view):
        replicas = number_of(place, "num_replicas")
        argument, note = "", ""
        if replicas and replicas != view.world_size:
            argument = "num_replicas"
            note = f"num_replicas={replicas}; there are {view.world_size} ranks"
        elif _ranks_with_one_sampler(place):
            argument = "rank"
            note = f"gets the same rank on {ranks_by_number(_ranks_with_one_sampler(place))}"
        if argument:
            found += _lines_that_gave(view, place, argument)
            found.append(place.pointed(note, is_fault=True))
    return found


def _ranks_with_one_sampler(place: CallSite) -> list[int]:
    """The first ranks whose samplers were made with the same arguments; [] if there are none."""
    by_text: dict[str, list[int]] = {}
    for rank, calls in sorted(place.by_rank.items()):
        by_text.setdefault(calls[-1].what, []).append(rank)
    return next((ranks for ranks in by_text.values() if len(ranks) > 1), [])


def _lines_that_gave(view: View, place: CallSite, argument: str) -> list[PointedLine]:
    given = given_at(place.line, (argument,), ARGUMENTS.index(argument), (SAMPLER,))
    line = set_at(run_lines(view, place.ranks[0]), given) if given is not None else place.line
    return [PointedLine(line, f"gives {argument}", True)] if line != place.line else []


# Collectives after which ranks read other rows of the batch than they were given.


def ranks_with_other_rows(view: View) -> tuple[int, ...]:
    """The ranks that read rows which others were given, and none of their own.

    Empty if it is not known what the ranks read, or if every row was read.
    """
    shards, read = view.setting.shards, view.observed.examples_read
    if shards is None or read is None or not read_by_no_rank(view):
        return ()
    found = []
    for rank, (given, parts) in enumerate(zip(shards, read, strict=True)):
        rows = {row for part in parts for row in part}
        others = {row for other, shard in enumerate(shards) if other != rank for row in shard}
        if rows and not rows & set(given) and rows <= others:
            found.append(rank)
    return tuple(found)


def lines_that_replace_rows(view: View) -> list[PointedLine]:
    """The last collective before the forward pass, if ranks then read the rows of other ones."""
    ranks = ranks_with_other_rows(view)
    note = f"after it {ranks_by_number(ranks)} read{'s' if len(ranks) == 1 else ''} others' rows"
    return last_of(data_collectives(view), note) if ranks else []
