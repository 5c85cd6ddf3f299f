"""The report on an observed script: what was compared, and what that guarantees."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, Style, labelled, paragraph
from ddp_equivalence.report.parameters import parameters_lines
from ddp_equivalence.report.render import full_lines
from ddp_equivalence.report.render import report_lines as lines_of_a_step
from ddp_equivalence.report.wrapping import plural

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.observed import Observed
    from ddp_equivalence.report.verdict import Verdict


def render(observed: Observed, full: bool) -> str:
    """The report as plain text. ``full``: with all that is known of every step."""
    return "".join(f"{line.text}\n" for line in report_lines(observed, full))


def report_lines(observed: Observed, full: bool = False) -> Iterator[Line]:
    """The report, line by line. ``full``: also where the run asks for all that is known."""
    full = full or settings.current().full_report
    verdict = observed.verdict
    if verdict.outcome == "same":
        yield Line(f"same: {observed.name}: {_steps(observed)} as in one process", Style.GOOD)
        yield Line("")
        yield from _table(observed)
        yield Line("")
        yield from paragraph(_guarantee(observed), "  ")
    elif verdict.outcome == "unknown":
        yield Line(f"unknown: {verdict.subject}", Style.UNCERTAIN)
        yield Line("")
        first, *rest = f"{verdict.reason[:1].upper()}{verdict.reason[1:]}".splitlines()
        yield from paragraph(first, "  ")
        yield from (Line(f"  | {line}") for line in rest)
        if verdict is not observed.ending:
            yield Line("  Nothing was shown, which is not a pass.")
    else:
        yield from full_lines(verdict) if full else lines_of_a_step(verdict)
    if verdict.outcome != "same" and len(observed.all_verdicts) > 1:
        yield from labelled("Steps: ", _outcomes(observed))
    for warning in observed.warnings:
        yield from (replace(line, style=Style.UNCERTAIN) for line in labelled("Warning: ", warning))
    if verdict.outcome != "different" or full:
        yield from _how(observed)
    elif observed.notes:
        yield from (line for note in observed.notes for line in labelled("Note: ", note))
    if full:
        for one in observed.verdicts:
            if one.outcome != "different":
                yield Line("")
                yield from full_lines(one)
            elif one is not verdict:
                yield from _not_explained(one)


def _not_explained(verdict: Verdict) -> Iterator[Line]:
    yield Line("")
    yield Line(f"{verdict.subject} is not what one process computes", Style.BAD)
    yield Line("")
    yield Line("  Only the first step that differs is explained.")
    yield from parameters_lines(verdict)


def _steps(observed: Observed) -> str:
    count = len(observed.verdicts)
    return f"{count} {plural(count, 'step')} on {observed.world_size} ranks"


def _outcomes(observed: Observed) -> str:
    """The outcome of every recorded step: ``1 same; 2, 3 different``."""
    numbers: dict[str, list[str]] = {}
    for number, verdict in enumerate(observed.verdicts, start=1):
        numbers.setdefault(verdict.outcome, []).append(str(number))
    return "; ".join(f"{', '.join(of)} {outcome}" for outcome, of in numbers.items())


def _table(observed: Observed) -> Iterator[Line]:
    yield Line("  step  optimizer       rows  micro-batches  loss       error    limit")
    for number, (verdict, facts) in enumerate(
        zip(observed.verdicts, observed.facts, strict=True), start=1
    ):
        optimizer = " + ".join(facts.optimizers)
        yield Line(
            f"  {number:>4}  {optimizer[:14]:<14}  {facts.rows:>4}  {facts.micro_batches:>13}  "
            f"{text_of(facts.loss, '.4g'):<9}  {_number(verdict.error)}  {_number(verdict.limit)}"
        )


def _only_rounding(observed: Observed) -> Iterator[str]:
    """What the table leaves out."""
    compared = [one.comparison for one in observed.verdicts if one.comparison is not None]
    names = dict.fromkeys(one.name for found in compared for one in found.only_rounding)
    if names and observed.outcome == "same":
        such_as = "such as " if len(names) > 1 else ""
        yield (
            f"the gradient of {len(names)} {plural(len(names), 'parameter')}, "
            f"{such_as}{next(iter(names))}, is zero "
            "except for rounding; the errors above are those of the others"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else text_of(value, ".1e")


def _limits(observed: Observed) -> Iterator[str]:
    """Where the limits in the table come from."""
    for verdict in observed.verdicts:
        worst = verdict.comparison.worst if verdict.comparison is not None else None
        if worst is None:
            continue
        reason, floor = worst.limit.reason, worst.limit.floor
        measured = f" ({floor:.0e})" if floor and "error of one device" in reason else ""
        yield f"{reason}{measured}"


def _guarantee(observed: Observed) -> str:
    return (
        "For these steps, from the weights that the ranks had, on the rows that they really read, "
        "the gradients that the optimizer gets on every rank are those that this script computes "
        "in one process."
    )


def _how(observed: Observed) -> Iterator[Line]:
    precision = "float64" if observed.float64 else "the script's own precision"
    cpu = ", its CUDA devices were the CPU" if observed.on_cpu else ""
    yield from labelled("Precision:   ", f"{precision}{cpu}")
    if (limits := dict.fromkeys(_limits(observed))) and observed.outcome == "same":
        yield from labelled("Limit:       ", "; ".join(limits))
    clips = [one.clips for one in observed.facts if one.clips]
    if clips:
        yield from labelled("Clipping:    ", f"{clips[0]} (in step 1)")
    for note in (*_only_rounding(observed), *observed.notes):
        yield from labelled("Note:        ", note)
    yield from labelled("Ranks:       ", shlex.join(observed.command))
    yield from labelled("One process: ", shlex.join(observed.one_process))
    recorded, replayed = observed.seconds
    seconds = f"{recorded:.0f} on the ranks, {replayed:.0f} in one process"
    yield from labelled("Seconds:     ", seconds)
