"""The lines that decide which examples each rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.examples_read import (
    read_by_no_rank,
    read_more_than_once,
    short_numbers,
)
from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.origins import Choice, choices, given_at, set_at
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.lines.words import last_of
from ddp_equivalence.diagnosis.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View, lines_of_the_big_batch
from ddp_equivalence.measurement.calls import CodeLine, Contents, Kind


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


def number_of(place: CallSite, argument: str) -> int:
    """What a sampler or loader was given for this argument; 0 if it is not known."""
    return int(dict(place.first.numbers).get(argument, 0))


def _what_was_read(view: View, place: CallSite, ranks: Sequence[int] = ()) -> str:
    """The examples that each rank read at this place; "" if they are not known.

    ``ranks``: only these of the ranks that read here; () for all.
    """
    readers = [rank for rank in place.ranks if rank in (ranks or place.ranks)]
    first = view.setting.first_example
    read = [
        sorted({one - first for call in place.by_rank[rank] for one in call.examples})
        for rank in readers[:MOST_READERS]
    ]
    shown = [
        f"rank {rank} reads {short_numbers(examples)}"
        for rank, examples in zip(readers, read, strict=False)
    ]
    return "; ".join([*shown, *(["..."] if readers[MOST_READERS:] else [])]) if all(read) else ""


def lines_of_reading(
    view: View, chosen: Sequence[PointedLine] = (), ranks: Sequence[int] = (), note: str = ""
) -> list[PointedLine]:
    """The lines that choose what is read, and the last one where it is read.

    ``chosen``: those that are known; without them, a sampler, or what chooses a share. ``ranks``:
    those that read wrongly. ``note``: on the line that reads, instead of what each rank reads.
    """
    chosen = (chosen or lines_of_samplers(view) or lines_that_share(view, ranks))[:MOST_SHARING]
    faults = {_in_file(one.line): one for one in chosen}
    lines = list(chosen)
    for place in [one for one in reads(view) if set(ranks or one.ranks) & set(one.ranks)][-1:]:
        text, known = note or _what_was_read(view, place, ranks), faults.get(_in_file(place.line))
        if known is None:
            is_fault = not any(one.is_fault for one in chosen)
            return [*lines, place.pointed(text, is_fault=is_fault)]
        lines[lines.index(known)] = replace(known, note=known.note or text)
    return lines


MOST_READERS = 3

MOST_SHARING = 2
"""So many lines are shown: of the three that fit, one is where the rows are read."""

MOST_NAMES = 2


def lines_that_share(view: View, ranks: Sequence[int] = ()) -> list[PointedLine]:
    """The lines that choose what the model was called with by numbers of the rank, the nearest
    first; not where rows are read. Without one, those that choose without the rank.

    ``ranks``: those that read wrongly. What cuts the end off is no matter of ranks: if only the
    last examples are missing, a line that chooses without the rank comes first.
    """
    rank = next(iter(ranks), min(view.observed.by_rank, default=0))
    known = {_in_file(place.line) for place in reads(view)}
    choosing = [one for one in _choices(view, rank) if _in_file(one.line) not in known]
    of_case = unless_it_fails(lambda: lines_of_the_big_batch(view.setting.case), lambda why: {})
    choosing = [one for one in choosing if one.line.number not in of_case.get(one.line.file, ())]
    constant = ("", "<module>")
    choosing = [one for one in choosing if one.of_rank or one.line.function not in constant]
    unread, count = read_by_no_rank(view), view.setting.example_count
    others = [one for one in choosing if not one.of_rank] if unread else []
    sharing = [one for one in choosing if one.of_rank]
    if unread == list(range(count - len(unread), count)) and not read_more_than_once(view):
        sharing = [*others[:1], *sharing]
    return list(map(_pointed, sharing or others))[:MOST_SHARING]


def _in_file(line: CodeLine) -> tuple[str, int]:
    """A comprehension may be a function of its own, on the same line."""
    return line.file, line.number


def _pointed(choice: Choice) -> PointedLine:
    names = list(choice.names[:MOST_NAMES])
    note = f"uses {' and '.join(names)}" if names else "says which examples are read"
    return PointedLine(choice.line, note, True)


def _choices(view: View, rank: int) -> list[Choice]:
    """The lines on the way to what the model was called with that choose what it holds."""
    run, found = run_lines(view, rank), dict[CodeLine, Choice]()
    for place in (*reads(view), *view.observed.calls.places(Kind.FORWARD)):
        for one in choices(run, place.line) if rank in place.by_rank else ():
            found.setdefault(one.line, one)
    return list(found.values())


SAMPLER = "DistributedSampler"
ARGUMENTS = ("dataset", "num_replicas", "rank")


def lines_of_samplers(view: View) -> list[PointedLine]:
    """The lines that made samplers with a wrong number of ranks, or with one rank on several, and
    the lines that made this number; or samplers that pad or drop, and loaders that drop.
    """
    repeated, unread = read_more_than_once(view), read_by_no_rank(view)
    found: list[PointedLine] = []
    for place in samplers(view):
        argument, note = "", ""
        replicas, count = number_of(place, "num_replicas"), int(place.first.value or 0)
        drops = bool(number_of(place, "drop_last"))
        by_text: dict[str, list[int]] = {}
        for rank, calls in sorted(place.by_rank.items()):
            by_text.setdefault(calls[-1].what, []).append(rank)
        alike = next((ranks for ranks in by_text.values() if len(ranks) > 1), [])
        if replicas not in (0, view.world_size):
            argument = "num_replicas"
            note = f"num_replicas={replicas}; there are {view.world_size} ranks"
        elif alike:
            argument, note = "rank", f"gets the same rank on {ranks_by_number(alike)}"
        elif replicas and count % replicas and not drops and repeated:
            note = f"pads {count} examples by {-count % replicas}"
        elif replicas and count % replicas and drops and unread:
            note = f"leaves out {count % replicas} examples"
        found += _lines_that_gave(view, place, argument) if argument else []
        found += [place.pointed(note, is_fault=True)] if note else []
    dropping = [
        one
        for one in loaders(view)
        if unread and number_of(one, "drop_last")
        if samplers(view) or int(one.first.value or 0) % max(1, number_of(one, "batch_size"))
    ]
    return found or last_of(dropping, "leaves out a last batch that is not full")


def lines_that_deal_to_all(view: View) -> list[PointedLine]:
    """The lines that say that a sampler deals the examples to every rank."""
    found: list[PointedLine] = []
    for place in samplers(view):
        if number_of(place, "num_replicas") == view.world_size:
            note = f"deals the examples to all {view.world_size} ranks"
            found += [*_lines_that_gave(view, place, "rank"), place.pointed(note, is_fault=True)]
    return found


def _lines_that_gave(view: View, place: CallSite, argument: str) -> list[PointedLine]:
    given = given_at(place.line, (argument,), ARGUMENTS.index(argument), (SAMPLER,))
    line = set_at(run_lines(view, place.ranks[0]), given).line if given is not None else place.line
    return [PointedLine(line, f"gives {argument}", True)] if line != place.line else []


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
