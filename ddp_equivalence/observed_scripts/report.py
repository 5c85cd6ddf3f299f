"""What observe is asked and what it returns: the report, JSON, and files that stand alone."""

from __future__ import annotations

import io
import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.checking.check import raise_unless_same
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.observed_scripts.oracle import CannotReplay
from ddp_equivalence.observed_scripts.record import BEFORE_CLIP, HELD, OWN, SeenClip, text_of_line
from ddp_equivalence.observed_scripts.script_step import ScriptStep
from ddp_equivalence.report.numbers import parameters_lines
from ddp_equivalence.report.record import finite
from ddp_equivalence.report.render import full_lines, pointed_lines
from ddp_equivalence.report.render import report_lines as lines_of_a_step
from ddp_equivalence.report.text import (
    Line,
    Style,
    encodable,
    labelled,
    paragraph,
    plural,
    write_file,
)
from ddp_equivalence.report.verdict import Outcome, Verdict

GUARANTEE = (
    "For these steps, from the weights that the ranks had, on the rows that they really read, "
    "the gradients that the optimizer gets on every rank are those that this script computes "
    "in one process."
)


def report_lines(observed: Observed, full: bool = False) -> Iterator[Line]:
    """The report, line by line. ``full``: also where the run asks for all that is known."""
    full = full or settings.current().full_report
    verdict = observed.verdict
    if verdict.outcome == "same":
        count = len(observed.verdicts)
        steps = f"{count} {plural(count, 'step')} on {observed.world_size} ranks"
        yield Line(f"same: {observed.name}: {steps} as in one process", Style.GOOD)
        yield Line("")
        yield from _table(observed)
        yield Line("")
        yield from paragraph(GUARANTEE, "  ")
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
        error, limit = (
            "-" if one is None else text_of(one, ".1e") for one in (verdict.error, verdict.limit)
        )
        yield Line(
            f"  {number:>4}  {optimizer[:14]:<14}  {facts.rows:>4}  {facts.micro_batches:>13}  "
            f"{text_of(facts.loss, '.4g'):<9}  {error}  {limit}"
        )


def _only_rounding(observed: Observed) -> Iterator[str]:
    """Says which parameters the table leaves out."""
    compared = [one.comparison for one in observed.verdicts if one.comparison is not None]
    names = dict.fromkeys(one.name for found in compared for one in found.only_rounding)
    if names and observed.outcome == "same":
        such_as = "such as " if len(names) > 1 else ""
        yield (
            f"the gradient of {len(names)} {plural(len(names), 'parameter')}, "
            f"{such_as}{next(iter(names))}, is zero "
            "except for rounding; the errors above are those of the others"
        )


def _limits(observed: Observed) -> Iterator[str]:
    """Where the limits in the table come from."""
    for verdict in observed.verdicts:
        worst = verdict.comparison.worst if verdict.comparison is not None else None
        if worst is None:
            continue
        reason, floor = worst.limit.reason, worst.limit.floor
        measured = f" ({floor:.0e})" if floor and "error of one device" in reason else ""
        yield f"{reason}{measured}"


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


@dataclass(frozen=True)
class Observed:
    """``name``: of the script. ``verdicts``: one for each recorded step, and ``facts`` of each.

    ``command``, ``one_process``: what ran on the ranks and in one process. ``seconds``: what both
    took. ``float64``: the script computed in float64. ``on_cpu``: its CUDA devices were the CPU.
    ``notes``: what a reader must know beside the verdicts. ``ending``: a verdict on the script as a
    whole, if it hung or failed before it had made all steps that were asked for.
    ``draws_alike``: the lines at which all ranks drew the same random numbers for their rows.
    """

    name: str
    verdicts: tuple[Verdict, ...]
    facts: tuple[StepFacts, ...]
    command: tuple[str, ...]
    one_process: tuple[str, ...]
    world_size: int
    seconds: tuple[float, float]
    float64: bool
    on_cpu: bool
    notes: tuple[str, ...]
    ending: Verdict | None = None
    draws_alike: tuple[str, ...] = ()

    @property
    def all_verdicts(self) -> tuple[Verdict, ...]:
        """Those on the steps, and that on the ending if there is one."""
        return self.verdicts if self.ending is None else (*self.verdicts, self.ending)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Findings that make no step wrong, and are seldom meant."""
        if not self.draws_alike:
            return ()
        return (
            "every rank draws the same random numbers for its rows, such as masks of dropout or "
            f"noise: at {', '.join(self.draws_alike)}. If that is not meant, seed each rank by its "
            "number after the model is made: torch.manual_seed(seed + rank)"
            "  [dropout_same_on_all_ranks]",
        )

    @property
    def verdict(self) -> Verdict:
        """That of the first step that is different; else of the first that is unknown; else of the
        last one.
        """
        for outcome in ("different", "unknown"):
            for verdict in self.all_verdicts:
                if verdict.outcome == outcome:
                    return verdict
        return self.verdicts[-1]

    @property
    def outcome(self) -> Outcome:
        """The outcome of that verdict."""
        return self.verdict.outcome

    @property
    def cause(self) -> str | None:
        """The cause of that verdict."""
        return self.verdict.cause

    def __str__(self) -> str:
        return self._text(full=False)

    def full_report(self) -> str:
        """Everything that is known of every step."""
        return self._text(full=True)

    def _text(self, full: bool) -> str:
        lines = "".join(f"{line.text}\n" for line in report_lines(self, full))
        return encodable(lines, sys.stdout)

    def assert_equivalent(self) -> Observed:
        """Raises NotEquivalent or NothingCompared, unless every step is the same."""
        __tracebackhide__ = True
        raise_unless_same(self.verdict)
        return self


# What ``observe`` found, as JSON for other programs.

SCHEMA = 1
"""The version of this format. It grows by one when a field changes its meaning or goes."""


def write_json(observed: Observed, path: Path) -> None:
    """Write everything that a program may want to know of an observed script."""
    write_file(path, f"{json.dumps(as_json(observed), indent=1, allow_nan=False)}\n")


def as_json(observed: Observed) -> dict[str, Any]:
    """The results as plain values. Numbers that are not finite are null."""
    recorded, replayed = observed.seconds
    return {
        "schema": SCHEMA,
        "script": observed.name,
        "outcome": observed.outcome,
        "cause": observed.verdict.cause,
        "reason": observed.verdict.reason,
        "command": list(observed.command),
        "one_process": list(observed.one_process),
        "world_size": observed.world_size,
        "float64": observed.float64,
        "cuda_on_cpu": observed.on_cpu,
        "seconds_on_ranks": recorded,
        "seconds_in_one_process": replayed,
        "torch": torch.__version__,
        "notes": list(observed.notes),
        "warnings": list(observed.warnings),
        "ending": None if (end := observed.ending) is None else end.outcome,
        "steps": [_step(observed, number) for number in range(len(observed.verdicts))],
    }


def _step(observed: Observed, number: int) -> dict[str, Any]:
    verdict, facts = observed.verdicts[number], observed.facts[number]
    because = verdict.unknown_because
    return {
        "number": number + 1,
        "outcome": verdict.outcome,
        "cause": verdict.cause,
        "reason": verdict.reason,
        "unknown_because": None if because is None else because.value,
        **asdict(facts),
        "loss": finite(facts.loss),
        "error": finite(verdict.error),
        "floor": finite(verdict.floor),
        "limit": finite(verdict.limit),
        "lines": _lines(verdict),
    }


def _lines(verdict: Verdict) -> list[dict[str, Any]]:
    if verdict.outcome != "different":
        return []
    return [
        {
            "file": one.line.file,
            "line": one.line.number,
            "note": one.note,
            "is_fault": one.is_fault,
        }
        for one in pointed_lines(verdict)
    ]


# Writes an observed step so that it stands alone: tensors, and a script that compares them.

SHOW = '''"""Compares the gradients of every rank with those of one process. It needs torch.

step.pt was recorded in a real run: weights, rows and gradients of every rank and of one process.
"""

from pathlib import Path

import torch

step = torch.load(Path(__file__).parent / "step.pt")
print(step["headline"])
print("ranks:      ", step["command"])
print("one process:", step["one_process"])
for rank, held in enumerate(step["gradients_of_ranks"]):
    print(f"rank {rank}:")
    for name, truth in step["gradients_of_one_process"].items():
        if held[name] is None or truth is None:
            print(f"  {name}: no gradient")
            continue
        truth, value = truth.double(), held[name].double()
        norm = truth.norm().item()
        error = (value - truth).norm().item() / norm if norm else value.norm().item()
        factor = (value * truth).sum().item() / norm**2 if norm else float("nan")
        print(f"  {name}: error {error:.2g}, nearest multiple {factor:.6g}")
'''


def export(step: ScriptStep, folder: Path, headline: str, command: str, one_process: str) -> Path:
    """Write the step to a new folder. Returns the script that shows the difference.

    Raises BadCase if the script did not compute the step in one process.
    """
    try:
        answer = step.answer(step.everything)
    except CannotReplay as error:
        raise BadCase("export", str(folder), f"a step that was replayed; {error}") from error
    folder.mkdir(parents=True)
    ranks = step.recorded
    found = {
        "headline": headline,
        "command": command,
        "one_process": one_process,
        "weights": step.weights(),
        "losses": [one.losses for one in ranks],
        "losses_in_one_process": answer.losses,
        "gradients_of_one_process": step.by_short_name(answer.gradients(BEFORE_CLIP)),
        "gradients_of_ranks": step.gradients_of_ranks(BEFORE_CLIP),
        "gradients_after_clipping": step.gradients_of_ranks(HELD),
        "own_gradients": step.gradients_of_ranks(OWN),
        "rows": [[dict(rows.all_tensors()) for rows in one.read_rows] for one in ranks],
    }
    script, saved = folder / "compare.py", io.BytesIO()
    torch.save(found, saved)
    write_file(folder / "step.pt", saved.getvalue())
    write_file(script, SHOW)
    return script


@dataclass(frozen=True)
class StepFacts:
    """``optimizers``: the classes of those that stepped. ``rows``: that all ranks read together.

    ``micro_batches``: the backward passes of a rank. ``loss``: the mean at which these began.
    ``clips``: what was clipped, in words.
    """

    optimizers: tuple[str, ...]
    rows: int
    micro_batches: int
    loss: float
    clips: str

    @classmethod
    def of(cls, step: ScriptStep) -> StepFacts:
        """Read them from the record."""
        recorded = step.recorded
        losses = [loss for one in recorded for loss in one.losses]
        return cls(
            optimizers=tuple(recorded[0].optimizers),
            rows=len(step.rows),
            micro_batches=max(len(one.losses) for one in recorded),
            loss=sum(losses) / max(1, len(losses)),
            clips="; ".join(dict.fromkeys(map(_clipped, recorded[0].clips))),
        )


def _clipped(clip: SeenClip) -> str:
    norm = "" if math.isnan(clip.norm) else f", its norm was {text_of(clip.norm, '.3g')}"
    place = f"{text_of_line(clip.place)}: " if clip.place else ""
    return f"{place}clipped to {text_of(clip.limit, '.3g')}{norm}"
