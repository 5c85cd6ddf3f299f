"""Checks programs one after the other, and prints the counts and every surprise."""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.programs.program import Program
from ddp_equivalence import check

OUTCOMES = ("same", "different", "unknown", "crashed")
NAMINGS = ("named alone", "among rivals", "unnamed", "wrongly named")


@dataclass(frozen=True)
class Result:
    """What the check of a program said. ``line``: the report's first two lines. ``causes``: the
    names of all explanations that it believes.
    """

    program: Program
    outcome: str
    because: str
    causes: tuple[str, ...]
    line: str
    seconds: float

    @property
    def expected(self) -> str:
        """The outcome that was declared, and for "unknown" why."""
        because = self.program.because
        return self.program.expected + (f" ({because.value})" if because else "")

    @property
    def got(self) -> str:
        """The outcome, and for "unknown" why."""
        return self.outcome + (f" ({self.because})" if self.because else "")

    @property
    def naming(self) -> str:
        """Whether the cause is rightly named; "" where no name was declared, or nothing differs."""
        right, believed = self.program.causes, set(self.causes)
        if right is None or self.outcome != "different":
            return ""
        if not believed:
            return "unnamed"
        if believed <= right:
            return "named alone"
        return "among rivals" if believed & right else "wrongly named"

    @property
    def surprising(self) -> bool:
        """True if the outcome or its reason is not the declared one, or another cause is named."""
        return self.got != self.expected or self.naming == "wrongly named"


def run(programs: list[Program], json_path: Path | None) -> int:
    """Check the programs, print the table, and return 1 if anything was a surprise."""
    results = []
    for number, program in enumerate(programs, 1):
        _print_progress(f"{number}/{len(programs)} {program.topic}: {program.name}")
        results.append(check_one(program))
        if results[-1].surprising:
            _print_progress("")
            print(surprise(results[-1]), flush=True)
    _print_progress("")
    print("\n".join(table(results)))
    print(naming_line(results), end="")
    surprises = [result for result in results if result.surprising]
    print(f"{len(surprises)} of {len(results)} had another outcome than declared")
    for result in surprises:
        print(f"  {result.program.name}: expected {result.expected}, got {result.got}")
    if json_path:
        json_path.write_text(json.dumps([as_json(result) for result in results], indent=1) + "\n")
    return int(bool(surprises))


def check_one(program: Program) -> Result:
    """Check a program. An exception is a result too: the outcome "crashed"."""
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = check(program.case, program.step, **program.options)
            text = str(verdict)
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        return Result(program, "crashed", "", (), text, time.monotonic() - started)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Result(
        program=program,
        outcome=verdict.outcome,
        because=verdict.unknown_because.value if verdict.unknown_because else "",
        causes=tuple(one.cause for one in verdict.findings if one.accepted),
        line="\n    ".join(lines[:3]),
        seconds=time.monotonic() - started,
    )


def surprise(result: Result) -> str:
    """What was expected of a program, what came, and the first lines of the report."""
    program = result.program
    side = "right" if program.right else "wrong"
    return (
        f"SURPRISE {program.name} ({side}, {program.topic}, {program.case.layout}): "
        f"{program.sentence}\n    expected {result.expected}, got {result.got}"
        f"{_names(result)}\n    {result.line}"
    )


def _names(result: Result) -> str:
    right, named = result.program.causes, " or ".join(result.causes)
    if right is None or not named:
        return ""
    return f"; {' or '.join(sorted(right)) or 'no known cause'}, named {named}"


def table(results: list[Result]) -> list[str]:
    """The counts of every outcome, by side and topic."""
    lines = [f"{'':<8}{'topic':<14}{'programs':>9}" + "".join(f"{name:>11}" for name in OUTCOMES)]
    for right in (True, False):
        side = "right" if right else "wrong"
        of_side = [result for result in results if result.program.right == right]
        for topic in dict.fromkeys(result.program.topic for result in of_side):
            of_topic = [result for result in of_side if result.program.topic == topic]
            lines.append(_row(side, topic, of_topic))
        if of_side:
            lines.append(_row(side, "all", of_side))
    return lines


def naming_line(results: list[Result]) -> str:
    """How many of the wrong programs whose cause was declared have their right name."""
    count = Counter(result.naming for result in results if result.program.causes is not None)
    if not count:
        return ""
    cells = ", ".join(f"{count[naming]} {naming}" for naming in NAMINGS)
    return f"causes of {count.total()} wrong programs: {cells}\n"


def _row(side: str, topic: str, results: list[Result]) -> str:
    count = Counter(result.outcome for result in results)
    cells = "".join(f"{count[name]:>11}" for name in OUTCOMES)
    return f"{side:<8}{topic:<14}{len(results):>9}{cells}"


def as_json(result: Result) -> dict[str, object]:
    """A result as JSON holds it."""
    program = result.program
    return {
        "name": program.name,
        "topic": program.topic,
        "right": program.right,
        "sentence": program.sentence,
        "layout": program.case.layout,
        "dtype": program.case.dtype_name,
        "expected": result.expected,
        "got": result.got,
        "causes": result.causes,
        "naming": result.naming,
        "report": result.line,
        "seconds": round(result.seconds, 3),
    }


def _print_progress(text: str) -> None:
    """Write on one line of stderr, so that stdout has the results only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()
