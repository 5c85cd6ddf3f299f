"""Tries small edits of a step without a known cause, and keeps those that repair it."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from time import monotonic

import torch
from torch import Tensor

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.repairs.edits import Edit, edits_of
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.time_left import EDITS, TimeLeft
from ddp_equivalence.diagnosis.view import expected_of, lines_of_the_big_batch
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.edited_code import (
    CannotEdit,
    EditedCode,
    kept_inside,
    run_as_edited,
)
from ddp_equivalence.measurement.observer import LocalsSeen
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.trials import holding, try_edits
from ddp_equivalence.reference import big_batch

# The idea is that of mutation-based fault localisation (Papadakis and Le Traon, "Metallaxis-FL:
# mutation-based fault localization", 2015): a line is suspicious if a change of it changes the
# result. Here the change must make every gradient that of the big batch.

NEAR = 2
"""Lines at this distance from one that the report points at are tried soon after it."""

PER_TIER = 8
"""A line that is less suspicious by one tier is worth as much as an edit that is less likely by so
many places in the table of rules."""

SHARED = 1
"""A line that computes the big batch, too, is less suspicious by so many tiers."""

LATER_IF_BROAD = 2
"""An edit of a broad kind is tried as late as one of a line that is so many tiers further away."""

RELATIVE = 1e-9
"""Gradients of the big batch in float64 are others if they differ by more than this, relative to
the largest element."""

TIMES_IN_A_PROCESS = 6.0
"""A process spends so many times the seconds of one check on trials, however many checks differ."""

PART_TO_VERIFY = 0.3
"""This part of the seconds is kept for whether right edits leave the big batch as it is, and are
right in another case."""

NOTHING_TO_EDIT = "no edit of a line that was seen to run could be made within the time"

ALL_SPENT = "earlier checks of this process have taken all the time that it may spend on them"

_spent = 0.0


def find_repairs(
    request: Request,
    expected: Expected,
    pointed: Callable[[], Sequence[PointedLine] | None],
    time: TimeLeft,
) -> Repairs:
    """Try edits of the lines that the step runs. An edit of a line that computes the big batch,
    too, must not change that.

    ``pointed``: gives the lines that the report points at without this, which are edited first, or
    None if none may be. ``time``: what explaining the difference may take; half of it may be used.
    """
    global _spent
    most = settings.current().trial_seconds
    unspent = TIMES_IN_A_PROCESS * most - _spent
    seconds = min(most, unspent, time.seconds / 2)
    is_users = request.strategy is None and not request.plant  # a planted fault is in no line
    if not is_users or request.in_process or not request.second_look or not most:
        return Repairs()
    if unspent <= 0:
        return Repairs(why_not=ALL_SPENT)
    if seconds <= 0:
        time.leave_out(EDITS)
        return Repairs()
    began = monotonic()
    try:
        with time.counted(EDITS, seconds):
            return unless_it_fails(
                lambda: _found(request, expected, pointed(), seconds, time.show),
                lambda why: Repairs(why_not=why),
            )
    except BadCase as error:  # this machine or this case allows no trials
        return Repairs(why_not=str(error).partition("\n")[0])
    finally:
        _spent += monotonic() - began


def _found(
    request: Request,
    expected: Expected,
    pointed: Sequence[PointedLine] | None,
    seconds: float,
    show: Callable[[str], object],
) -> Repairs:
    if pointed is None:
        return Repairs()
    expected.batches()  # raises BadCase for a batch that is another one at each call
    of_the_case = lines_of_the_big_batch(
        request.case, request.compare, request.training, request.steps
    )
    edits: list[Edit] = []
    until = monotonic() + seconds

    def propose(seen: LocalsSeen) -> list[EditedCode]:
        edits.extend(in_order(of_the_case, seen, pointed))
        return [edit.code for edit in edits]

    tried = try_edits(
        request,
        expected,
        propose,
        lambda n: not edits[n].mistake.is_broad,
        (1 - PART_TO_VERIFY) * seconds,
        show,
    )
    right: list[Edit] = []
    for edit in sorted((edits[n] for n in tried.right), key=lambda one: one.mistake.is_broad):
        in_time = not right or monotonic() <= until
        if in_time and leaves_the_big_batch(request, expected, edit):
            right.append(edit)
    right = in_general(request, expected, right, until)
    why_not = tried.why_not or ("" if tried.count else NOTHING_TO_EDIT)
    return Repairs(_repairs_of(right), len(right), tried.count, tried.of, why_not)


def in_order(
    of_the_case: Mapping[str, set[int]], seen: LocalsSeen, pointed: Sequence[PointedLine]
) -> list[Edit]:
    """All edits of the lines that were seen to run, those first that are most likely right."""

    def cost(edit: Edit) -> int:
        tiers = _tier(pointed, edit.code.file, edit.line) + LATER_IF_BROAD * edit.mistake.is_broad
        tiers += SHARED * (edit.line in of_the_case.get(edit.code.file, ()))
        return PER_TIER * tiers + edit.place

    found: list[Edit] = []
    for file, lines in seen.lines.items():
        values = {line: one for (other, line), one in seen.values.items() if other == file}
        found += edits_of(file, "".join(linecache.getlines(file)), lines, values)
    return sorted(found, key=cost)


def _tier(pointed: Sequence[PointedLine], file: str, line: int) -> int:
    """0 for a line that the report marks, and more the further away a line is from such lines."""
    tiers = [4]
    for one in pointed:
        if one.line.file == file:
            away = abs(one.line.number - line)
            if away == 0:
                tiers.append(0 if one.is_fault else 1)
            elif away <= NEAR:
                tiers.append(2)
            else:
                tiers.append(3)
    return min(tiers)


def leaves_the_big_batch(request: Request, expected: Expected, edit: Edit) -> bool:
    """True if the big batch has the same gradients with this edit: it is right by definition."""
    case, right = request.case, expected.reference.expected
    try:
        edited = run_as_edited(edit.code, (case.model, case.batch, case.loss))
        with without_planted_faults(), kept_inside(other_threads=False), edited:
            found = big_batch(case, request.compare, request.training, request.steps).expected
    except CannotEdit:  # the big batch has nothing to do with these functions
        return True
    except Exception:
        return False
    return found.keys() == right.keys() and all(
        _close(one, right[key]) for key, one in found.items()
    )


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    one, other = one.to_dense(), other.to_dense()
    largest = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=RELATIVE * largest)


def _repairs_of(edits: Iterable[Edit]) -> tuple[Repair, ...]:
    """The first edit of each line, as a report shows it."""
    first: dict[CodeLine, Repair] = {}
    for edit in sorted(edits, key=lambda one: one.mistake.is_broad):
        line, mistake = CodeLine(edit.code.file, edit.line), edit.mistake
        repair = Repair(line, edit.before, edit.after, mistake.said, mistake.is_broad)
        first.setdefault(line, repair)
    return tuple(first.values())


# An edit of the user's code with which every rank was seen to hold the big batch's gradients.

LONGEST = 60
"""Longer code is cut, on both sides of what an edit changes in it."""

BESIDE = 40
"""So many characters are shown on each side of it."""


@dataclass(frozen=True)
class Repair:
    """``before``, ``after``: the code that was replaced, and what stood there instead.

    ``said``: the same in words, where these say it better. ``is_broad``: True for an edit that may
    repair the step although the fault is elsewhere.
    """

    line: CodeLine
    before: str
    after: str
    said: str = ""
    is_broad: bool = False

    @property
    def text(self) -> str:
        """The change, as part of a sentence: ``with `a - b` in place of `a + b` ``."""
        after, before = _where_they_differ(self.after, self.before)
        return self.said or f"with `{after}` in place of `{before}`"


@dataclass(frozen=True)
class Repairs:
    """What the trials of edits have shown: ``found``, one for each line, the most likely first:
    those that are not broad, and of equal ones the first that was tried.

    ``right``: how many edits repair the step, several of one line among them. ``tried``: how many
    were tried, ``of`` so many. ``why_not``: why none was tried.
    """

    found: tuple[Repair, ...] = ()
    right: int = 0
    tried: int = 0
    of: int = 0
    why_not: str = ""

    @property
    def shows_the_fault(self) -> bool:
        """True if edits that are not broad were found, and only beside one line."""
        lines = [one.line for one in self.found if not one.is_broad]
        first = next(iter(lines), None)
        return first is not None and all(
            one.file == first.file and abs(one.number - first.number) <= NEAR for one in lines
        )

    @property
    def told(self) -> tuple[Repair, ...]:
        """The most likely edits: one, or that of another line as well if this is far away; none if
        they may only leave out what is wrong elsewhere.
        """
        sure = tuple(one for one in self.found if not one.is_broad)
        return sure[: 1 if self.shows_the_fault else 2]

    @property
    def text(self) -> str:
        """The most likely edits that repair the step, and how many do; "" if there are none, or if
        they may only leave out what is wrong elsewhere.
        """
        if not self.told:
            return ""
        edits = ", or ".join(f"line {one.line.number} {one.text}" for one in self.told)
        right = f"{edits}: all gradients are right"
        # Some of the others hung, or were given up: of them it is not known.
        return f"{right}. Of {self.tried} changes tried, {self.right} repaired the step"


def lines_of_repairs(repairs: Repairs) -> Iterator[PointedLine]:
    """The lines that were edited, for a report; the first is the most likely one, and is marked if
    no edit far away repairs the step as well.
    """
    for number, one in enumerate(repairs.found):
        is_fault = number == 0 and repairs.shows_the_fault
        note = "" if one in repairs.told else f"tried {one.text}: all gradients are right"
        yield PointedLine(one.line, note, is_fault)


def _alike(*texts: str) -> int:
    """With how many characters in common the texts begin."""
    pairs = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda pair: len(set(pair)) == 1, pairs))


def _where_they_differ(*codes: str) -> list[str]:
    """Each code on one line; of long ones, what differs and a little on each side of it."""
    texts = [" ".join(one.split()) for one in codes]
    if max(map(len, texts)) <= LONGEST:
        return texts
    same = _alike(*texts)
    same_end = _alike(*(one[same:][::-1] for one in texts))
    before, after = max(0, same - BESIDE), max(0, same_end - BESIDE)
    shown = []
    for text in texts:
        part = text[before : len(text) - after]
        is_cut = after > 0 or len(part) > LONGEST + 20
        shown.append(f"{'...' * bool(before)}{part[: LONGEST + 20]}{'...' * is_cut}")
    return shown


# Whether an edit repairs the step for good, or only hides what is wrong in this one case.

MOST_RANKS = 8
"""The other layout on which an edit must be right has no more."""


def in_general(
    request: Request, expected: Expected, right: Sequence[Edit], until: float
) -> list[Edit]:
    """Those of the right edits that repair the step on another layout with another seed as well:
    `rank == 1` -> `rank > 1` repairs two ranks only.
    """
    other = _elsewhere(request, expected)
    try:
        codes = [edit.code for edit in right]
        return [right[number] for number in holding(other, expected_of(other), codes, until)]
    except BadCase:  # this case cannot be split over other ranks
        return [*right]


def _elsewhere(request: Request, expected: Expected) -> Request:
    """The request on another layout, if the case allows one, and with another seed."""
    case, size = request.case, request.case.ranks.world_size
    sizes = (2 * size, size // 2, size + 1) if request.lane.device_type == "cpu" else (size // 2,)
    examples = expected.reference.examples
    for other in sizes if isinstance(case.shards, str) and "+" not in case.shards else ():
        if 1 < other <= MOST_RANKS and not any(count % other for count in examples):
            nodes = 2 if case.ranks.nodes == 1 and other % 2 == 0 else 1
            case = replace(case, layout=f"{nodes}x{other // nodes}")
            break
    return replace(request, case=replace(case, seed=case.seed + 1))
