"""The end of a report: the fix, what else a reader must know, and how to repeat the check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.examples_read import short_numbers
from ddp_equivalence.report.fresh_ranks import LABEL, fresh_ranks_text
from ddp_equivalence.report.line import Line, Style
from ddp_equivalence.report.random_numbers import random_number_text
from ddp_equivalence.report.short.text import ended, wrapped_lines

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

GAP = "     "

MOST_EXAMPLES = 8
"""So many examples of one step are listed."""


def fix_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """What to write instead, at most so many lines for each cause."""
    lines = []
    for fix in _fixes(verdict):
        first, *rest = wrapped_lines(f"Fix: {ended(fix)}", width, most)
        lines += [Line(first.text, Style.LABEL, styled=len("  Fix:")), *rest]
    return lines


def _fixes(verdict: Verdict) -> list[str]:
    """The edit that repairs the step, if one was found; otherwise the fix of each cause; without a
    cause, that of the place where the difference is.
    """
    if verdict.repairs.shows_the_fault:
        return [verdict.repairs.fix]
    best = verdict.findings[0] if verdict.findings else None
    if best is not None and best.accepted:
        fixes = [one.fix for one in (best, *best.more)]
    else:
        whereabouts = verdict.localisation.whereabouts
        fixes = [] if whereabouts is None else [whereabouts.fix or verdict.repairs.fix]
    return [fix for fix in dict.fromkeys(fixes) if fix]


def note_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """What is not as a reader expects it, at most so many lines for each."""
    return [line for text in _notes(verdict) for line in wrapped_lines(text, width, most)]


def _notes(verdict: Verdict) -> Iterator[str]:
    if verdict.planted:
        yield f"The fault {verdict.planted} was planted on purpose."
    yield from training_notes(verdict)
    if verdict.repeated is False:
        yield "The same step left other bits when it ran again: a race, or an unseeded generator."
    if drawn := random_number_text(verdict):
        yield drawn
    if verdict.float32_at:
        yield f"Off by float32's rounding; the step computes in float32: {verdict.float32_at}"
    if verdict.why_not_float64:
        yield "The loss cannot be computed in float64, so the big batch was not, either."
    if verdict.masks_unpredictable:
        again = verdict.without_dropout
        yield f"Without dropout: {'not judged' if again is None else again.outcome}."
    if fresh := fresh_ranks_text(verdict):
        yield f"{LABEL}{fresh}"
    if not verdict.observed and verdict.why_not_watched and not verdict.repairs.found:
        yield f"No lines of code are known, because {verdict.why_not_watched}."
    if verdict.not_tried and verdict.analysis is not None:
        deadline = verdict.analysis.time.deadline
        first, *more = verdict.not_tried
        left = f"{first} and more" if more else first
        yield f"The deadline of {deadline:g} s left no time for {left}."
    if any(text.strip() for text in verdict.output.values()):
        yield "The ranks printed something, which the whole report shows."


def training_notes(verdict: Verdict) -> Iterator[str]:
    """How the reference trains, and which step of a trainer is wrong."""
    if verdict.wrong_step is not None:
        yield verdict.wrong_step.sentence
    if verdict.read_in_another_order:
        yield "The big batches follow what the steps read: another order than the batch has."
        if verdict.wrong_step is not None and verdict.wrong_step.number is not None:
            yield _examples_of_step_text(verdict, verdict.wrong_step.number)
    if verdict.training.is_of_the_user:
        yield _own_reference_text(verdict)
    elif verdict.outcome == "same":
        return
    elif verdict.compare == "update" and verdict.training.is_plain_sgd:
        yield f"Compared with plain SGD, learning rate {verdict.lr:g}: is that what the step does?"
    elif verdict.compare == "update":
        yield "Compared with your optimizer= and clip=: are they those of the step?"


def _examples_of_step_text(verdict: Verdict, number: int) -> str:
    """Which examples of the batch a report that counts those of one step from 0 speaks of."""
    first = sum(verdict.examples[: number - 1])
    of_step = verdict.read_order[first : first + verdict.examples[number - 1]]
    numbers = short_numbers(of_step, MOST_EXAMPLES)
    return f"Examples 0 to {len(of_step) - 1} of step {number} are {numbers} of the batch."


def _own_reference_text(verdict: Verdict) -> str:
    text = "Compared with your own reference="
    return f"{text}." if verdict.outcome == "same" else f"{text}, from which no cause is predicted."


def again_lines(verdict: Verdict, width: int) -> list[Line]:
    """The command that repeats the check, never broken, and how to get the whole report."""
    more = f"More: {settings.current().full_report_with}"
    if not verdict.repeat:
        return [_label(more)]
    again = f"Again: {verdict.repeat}"
    together = f"{again}{GAP}{more}"
    if len(together) + 2 <= width:
        return [_label(together)]
    return [_label(again), _label(more)]


def _label(text: str) -> Line:
    return Line(f"  {text}", Style.LABEL, styled=2 + text.index(":") + 1)
