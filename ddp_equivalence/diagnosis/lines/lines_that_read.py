"""The lines that decide which examples each rank reads."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Sequence

from ddp_equivalence.diagnosis.examples_read import compact_numbers, example_numbers
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import functions_named, inside
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine, Contents, Kind


def samplers(view: View) -> list[Place]:
    """The lines that made a DistributedSampler."""
    return view.observed.calls.places(Kind.SAMPLER)


def loaders(view: View) -> list[Place]:
    """The lines that made a DataLoader."""
    return view.observed.calls.places(Kind.LOADER)


def data_collectives(view: View) -> list[Place]:
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


def reads(view: View) -> list[Place]:
    """The lines that first held what the model was called with."""
    return view.observed.calls.places(Kind.READ)


def read_at(view: View, place: Place, rank: int) -> list[int]:
    """The examples of this step that a rank read at this place, in their order."""
    first = view.setting.first_example
    return [one - first for call in place.by_rank.get(rank, ()) for one in call.examples]


def padding_of(place: Place) -> int:
    """By how many examples the samplers of this line pad the data set; 0 if they do not."""
    length, ranks = int(place.first.value or 0), replicas_of(place)
    if "drop_last=False" not in place.first.what or not length or not ranks:
        return 0
    return math.ceil(length / ranks) * ranks - length


def dropped_by(place: Place) -> int:
    """How many examples the samplers of this line leave out of the data set."""
    length, ranks = int(place.first.value or 0), replicas_of(place)
    if "drop_last=True" not in place.first.what or not length or not ranks:
        return 0
    return length % ranks


def last_batch_of(view: View, place: Place) -> int:
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


def replicas_of(place: Place) -> int:
    """The number of ranks that the samplers of this line were given; 0 if it is not known."""
    return _number_after("num_replicas=", place.first.what)


def _number_after(word: str, text: str) -> int:
    """The whole number that follows a word; 0 if there is none."""
    _, _, after = text.partition(word)
    digits = after.partition(",")[0].rstrip(")")
    return int(digits) if digits.isdigit() else 0


def ranks_that_read(view: View, place: Place, examples: Sequence[int]) -> list[int]:
    """The ranks that read one of these examples at this place."""
    return [rank for rank in place.ranks if set(examples) & set(read_at(view, place, rank))]


def what_was_read(
    view: View, place: Place, ranks: Sequence[int] | None = None, most: int = 3
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
        begins = place.first.made_at
        run = run_lines(view, place.ranks[0])
        for function in functions_named(begins.file, begins.function) if begins else ():
            if begins is None or not begins.number <= function.lineno <= begins.number + 20:
                continue
            lines = [
                CodeLine(begins.file, node.lineno, function.name)
                for node in inside(function)
                if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom))
            ]
            ran = [line for line in lines if run.times.get(line)]
            note = f"what the loader of line {place.line.number} goes through"
            return [PointedLine(line, note, True) for line in ran[-1:]]
    return []
