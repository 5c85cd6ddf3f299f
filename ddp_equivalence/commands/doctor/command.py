"""``ddp-equivalence doctor``: say what this machine can run, why not the rest, and what to do."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME
from ddp_equivalence.ranks.server import start_early

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.doctor.machine import Machine
    from ddp_equivalence.commands.doctor.problem import Problem
    from ddp_equivalence.commands.doctor.state import State

WIDTH = 100


def add(commands: Commands) -> None:
    """Add the command's parser."""
    commands.add_parser(
        "doctor",
        help="say what this machine can run, why not the rest, and what to do",
        description="Look at the machine, multiply on every GPU, sum over every pair of GPUs and "
        "over all of them, and ask every lane's collectives questions with known answers. Exit "
        "code 0: all answers are right, 1: some are wrong, 3: a part that should work gave none.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine the machine, print what it can do, and return the exit code."""
    start_early()  # the ranks' server imports torch while this process does
    from ddp_equivalence.commands.doctor.examination import Examination
    from ddp_equivalence.commands.doctor.machine import this_machine

    machine = this_machine()
    examination = Examination(machine)
    for line in machine_lines(machine):
        print(line, flush=True)
    for line in examination.lines():
        print(line, flush=True)  # a pair of GPUs that hangs takes half a minute
    for line in problem_lines(examination.problems()):
        print(line)
    if not machine.devices:
        print(
            "\nCases that would run on NCCL run on gloo and the CPU instead, and are marked "
            "gloo_fallback."
        )
    return exit_code(examination.states)


def machine_lines(machine: Machine) -> Iterator[str]:
    """The versions and devices of this machine."""
    from ddp_equivalence.report.versions import versions

    installed = versions()
    yield (
        f"ddp_equivalence {installed['ddp_equivalence']}, torch {installed['torch']}, "
        f"Python {installed['python']}"
    )
    yield f"{installed['platform']}, {os.cpu_count()} CPU cores"
    cuda = f" (CUDA {installed['cuda']}, NCCL {installed['nccl']})" if machine.devices else ""
    yield f"CUDA devices: {len(machine.devices)}{cuda}"
    yield ""


def problem_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """What is wrong, or may surprise, and what to do about it. Nothing if there are no problems."""
    if problems:
        yield ""
        yield "Problems, and what to do"
    for problem in problems:
        yield from _wrapped(_capitalised(problem.what), "  - ")
        yield from _wrapped(_capitalised(problem.advice), "    ")


def exit_code(states: Sequence[State]) -> int:
    """1 if an answer was wrong, else 3 if a part that should have answered did not, else 0."""
    from ddp_equivalence.commands.doctor.state import Outcome

    outcomes = {state.outcome for state in states}
    if Outcome.WRONG in outcomes:
        return DIFFERENT
    return NOT_JUDGED if Outcome.FAILED in outcomes else SAME


def _wrapped(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        f"{text}.",
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _capitalised(sentence: str) -> str:
    """With a capital letter, unless it begins with a command or a name."""
    first = sentence.split(" ", 1)[0].rstrip(",")
    return sentence[0].upper() + sentence[1:] if first.isalpha() else sentence
