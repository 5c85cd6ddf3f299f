"""``ddp-equivalence doctor``: say what this machine can run, why not the rest, and what to do."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.report.text import plural, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.commands.doctor.examination import State
    from ddp_equivalence.commands.doctor.problems import Problem

HELP = "say what this machine can run, why not the rest, and what to do"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Look at the machine, multiply on every GPU, sum over every pair of GPUs and "
        "over all of them, and ask every lane's collectives questions with known answers. Exit "
        "code 0: all answers are right, 1: some are wrong, 3: a part that should work gave none."
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine, print what it can do, and return the exit code."""
    start_early()  # the ranks' server imports torch while this process does
    from ddp_equivalence.commands.doctor.examination import State, examine, this_machine
    from ddp_equivalence.commands.doctor.problems import problems
    from ddp_equivalence.report.machine import Box, box_lines

    machine, states = this_machine(), list[State]()
    for line in (*box_lines(Box(machine.gpus, len(machine.devices))), ""):
        print(line, flush=True)
    for one in examine(machine):
        states += [one] if isinstance(one, State) else []
        print(one, flush=True)  # a pair of GPUs that hangs takes half a minute
    for line in problem_lines(list(problems(machine, states))):
        print(line)
    if not machine.devices:
        print(
            "\nCases that would run on NCCL run on gloo and the CPU instead, and are marked "
            "gloo_fallback."
        )
    code, line = result(states)
    print(f"\n{line}")
    return code


def problem_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """The problems, also those that only may surprise, and what to do about them."""
    if problems:
        yield ""
        yield "Problems, and what to do"
    for problem in problems:
        yield from wrapped(f"{_capitalised(problem.what)}.", "  ", "  - ")
        yield from wrapped(f"{_capitalised(problem.advice)}.", "    ")


def result(states: Sequence[State]) -> tuple[int, str]:
    """The exit code, and the last line: 1 if an answer was wrong, else 3 if a part that should have
    answered did not, else 0.
    """
    from ddp_equivalence.commands.doctor.examination import Outcome

    counts = Counter(state.outcome for state in states)
    parts = f"{len(states)} {plural(len(states), 'part')}"
    if wrong := counts[Outcome.WRONG]:
        code = DIFFERENT
        text = f"{wrong} of {parts} gave WRONG answers, so training here goes wrong as well"
    elif failed := counts[Outcome.FAILED]:
        code, text = NOT_JUDGED, f"{failed} of {parts} gave no answer, though they should work"
    else:
        others = "; the others could not be asked" if counts[Outcome.NOT_RUN] else ""
        code, text = SAME, f"{counts[Outcome.WORKS]} of {parts} gave right answers{others}"
    return code, f"Result: {text} (exit code {code})."


def _capitalised(sentence: str) -> str:
    """With a capital letter, unless it begins with a command or a name."""
    first = sentence.split(" ", 1)[0].rstrip(",")
    return sentence[0].upper() + sentence[1:] if first.isalpha() else sentence
