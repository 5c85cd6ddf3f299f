"""The lines that decide which examples each rank reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.examples_read import (
    compact_numbers,
    example_numbers,
    read_by_no_rank,
    short_numbers,
)
from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.origins import Choice, Sources, given_to_class, sole_origin
from ddp_equivalence.diagnosis.lines.source import RETURNS, functions_named, inside, run_lines
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
    return view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: (
            call.backwards == 0
            and not call.in_backward
            and call.collective is not None
            and call.collective.contents is Contents.OTHER
            and call.collective.elements > 1
        ),
    )


def reads(view: View) -> list[CallSite]:
    """The lines that first held what the model was called with."""
    return view.observed.calls.places(Kind.READ)


def read_at(view: View, place: CallSite, rank: int) -> list[int]:
    """The examples of this step that a rank read at this place, in their order."""
    first = view.setting.first_example
    return [one - first for call in place.by_rank.get(rank, ()) for one in call.examples]


def padding_of(place: CallSite) -> int:
    """By how many examples the samplers of this line pad the data set; 0 if they do not."""
    length, ranks = int(place.first.value or 0), replicas_of(place)
    pads = "drop_last=False" in place.first.what and ranks > 0
    return -length % ranks if pads else 0


def dropped_by(place: CallSite) -> int:
    """How many examples the samplers of this line leave out of the data set."""
    length, ranks = int(place.first.value or 0), replicas_of(place)
    drops = "drop_last=True" in place.first.what and ranks > 0
    return length % ranks if drops else 0


def last_batch_of(view: View, place: CallSite) -> int:
    """How many examples the loaders of this line leave out, since they do not fill a batch.

    0 if that is not known.
    """
    text, length = place.first.what, int(place.first.value or 0)
    size = _number_after("batch_size=", text)
    if "drop_last=True" not in text or not size:
        return 0
    if "sampler=DistributedSampler" in text:
        for sampler in samplers(view)[-1:]:
            ranks = replicas_of(sampler)
            length = (length + padding_of(sampler) - dropped_by(sampler)) // max(1, ranks)
    elif "sampler=" in text:
        return 0
    return length % size


def replicas_of(place: CallSite) -> int:
    """The number of ranks that the samplers of this line were given; 0 if it is not known."""
    return _number_after("num_replicas=", place.first.what)


def _number_after(word: str, text: str) -> int:
    """The whole number that follows a word; 0 if there is none."""
    _, _, after = text.partition(word)
    digits = after.partition(",")[0].rstrip(")")
    return int(digits) if digits.isdigit() else 0


def ranks_that_read(view: View, place: CallSite, examples: Sequence[int]) -> list[int]:
    """The ranks that read one of these examples at this place."""
    return [rank for rank in place.ranks if set(examples) & set(read_at(view, place, rank))]


def what_was_read(
    view: View, place: CallSite, ranks: Sequence[int] | None = None, most: int = 3
) -> str:
    """The examples that each rank read at this place; "" if they are not known.

    ``ranks``: only these of the ranks that read here.
    """
    shown = []
    readers = [rank for rank in place.ranks if ranks is None or rank in ranks]
    for rank in readers[:most]:
        examples = sorted(set(read_at(view, place, rank)))
        if not examples:
            return ""
        shown.append(f"rank {rank} reads {compact_numbers(examples)}")
    return "; ".join(shown) + ("; ..." if len(readers) > most else "")


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
        line = call.users_line or call.line
        times = Counter(one - first for one in call.examples)
        if call.kind is not Kind.INDICES or line is None or not set(times) <= every:
            continue
        if set(times) == every and max(times.values()) == 1:
            was_whole = True
        elif was_whole and examples and chosen(times) == set(examples):
            return [PointedLine(line, f"{call.what} {note}", True)]
    return []


def lines_of_own_sampler(view: View) -> list[PointedLine]:
    """Where a sampler of the user's own, which a loader was given, returned its order."""
    for place in loaders(view)[-1:]:
        begins, run = place.first.made_at, run_lines(view, place.ranks[0])
        for function in functions_named(begins.file, begins.function) if begins else ():
            if begins is None or not begins.number <= function.lineno <= begins.number + 20:
                continue
            lines = [
                CodeLine(begins.file, node.lineno, function.name)
                for node in inside(function)
                if isinstance(node, RETURNS)
            ]
            note = f"what the loader of line {place.line.number} goes through"
            ran = [line for line in lines if run.times.get(line)]
            return [PointedLine(line, note, True) for line in ran[-1:]]
    return []


# The lines that choose which of all examples a rank reads.

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
    with numbers of the rank what the model was called with. ``ranks``: those that read wrongly.
    """
    listed, choices = _lines_and_choices(view, ranks)
    chosen = [_pointed(one) for one in _clearest(choices)]
    return [*listed, *chosen][:MOST_SHARING]


def lines_that_leave_out(view: View) -> list[PointedLine]:
    """The same, where examples were read by no rank. What cuts the end off is no matter of ranks:
    if only the last ones are missing, a line that chooses without the rank comes first.
    """
    listed, choices = _lines_and_choices(view, ())
    others = [one for one in choices if one.distance is None]
    sharing = _clearest(choices)
    unread, count = read_by_no_rank(view), view.setting.example_count
    if unread == list(range(count - len(unread), count)):
        sharing = [*others[:1], *sharing]
    return [*listed, *map(_pointed, sharing or others)][:MOST_SHARING]


def _lines_and_choices(view: View, ranks: Sequence[int]) -> tuple[list[PointedLine], list[Choice]]:
    """The line with the positions, and the choices on other lines; not where rows are read."""
    rank = next(iter(ranks), min(view.observed.by_rank, default=0))
    listed = _line_of_positions(view, rank)
    lines = [*(place.line for place in reads(view)), *(one.line for one in listed)]
    known = {_place_in_file(line) for line in lines}
    return listed, [one for one in _choices(view, rank) if _place_in_file(one.line) not in known]


def _place_in_file(line: CodeLine) -> tuple[str, int]:
    """A comprehension may be a function of its own, on the same line."""
    return line.file, line.number


def with_reads(chosen: Sequence[PointedLine], read: Sequence[PointedLine]) -> list[PointedLine]:
    """These lines, and those at which rows are read; each line once, with the note of the latter if
    it has none of its own.
    """
    notes = {_place_in_file(one.line): one.note for one in read}
    known = {_place_in_file(one.line) for one in chosen}
    return [
        *(replace(one, note=one.note or notes.get(_place_in_file(one.line), "")) for one in chosen),
        *(one for one in read if _place_in_file(one.line) not in known),
    ]


def _pointed(choice: Choice) -> PointedLine:
    names = list(choice.names[:MOST_NAMES])
    return PointedLine(choice.line, f"uses {' and '.join(names)}" if names else "", True)


def _clearest(choices: Sequence[Choice]) -> list[Choice]:
    """The first ones from which it is not far to the rank; one of them names it, if any does."""
    of_rank = [(one.distance, one) for one in choices if one.distance is not None]
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
    lines = {call.users_line or call.line for call in found}
    if len(found) < len(by_rank) or len(lines) != 1 or None in lines:
        return []
    called = by_rank[rank]
    assert called is not None
    same = [one for one, call in by_rank.items() if call and call.examples == called.examples]
    first = view.setting.first_example
    numbers = short_numbers([one - first for one in called.examples], MOST_ENTRIES)
    note = f"{called.what} is {numbers} on {ranks_by_number(same)}"
    line = called.users_line or called.line
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
    sources = Sources(run_lines(view, rank))
    found: dict[CodeLine, Choice] = {}
    for line in _lines_of_inputs(view, rank):
        for one in sources.choices(line):
            found.setdefault(one.line, one)
    return list(found.values())


def _lines_of_inputs(view: View, rank: int) -> list[CodeLine]:
    places = [place for place in reads(view) if rank in place.by_rank]
    forwards = view.observed.calls.places(Kind.FORWARD)
    passes = [place for place in forwards if rank in place.by_rank]
    return [place.line for place in (*places, *passes)]


# Samplers of torch that were given another number of ranks, or another rank, than they run on.

SAMPLER = "DistributedSampler"
ARGUMENTS = ("dataset", "num_replicas", "rank")


def lines_of_wrong_samplers(view: View) -> list[PointedLine]:
    """The line that made a sampler with a wrong number of ranks, or with one rank on several, and
    the line that made this number.
    """
    found: list[PointedLine] = []
    for place in samplers(view):
        replicas = replicas_of(place)
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
    run = run_lines(view, place.ranks[0])
    given = given_to_class(run, SAMPLER, ARGUMENTS, argument)
    lines = [line for bound in given if (line := sole_origin(run, bound)) is not None]
    return [
        PointedLine(line, f"gives {argument}", True) for line in lines[:1] if line != place.line
    ]


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
