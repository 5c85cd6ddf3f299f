"""``ddp-equivalence doctor``: say which lanes this machine can run, and why not the others."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME
from ddp_equivalence.ranks.server import start_early

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.doctor.lane_states import LaneState

WORDS = {True: "works", False: "WRONG", None: "no"}
"""The word that is printed for each value of ``LaneState.works``."""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    commands.add_parser(
        "doctor",
        help="say which lanes this machine can run, and why not the others",
        description="Start 2 ranks on every lane that this machine can run, and ask its "
        "collectives questions with known answers. Exit code 0: all answers are right, 1: some are "
        "wrong.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Try every lane, print what it can do, and return the exit code."""
    start_early()  # the ranks' server imports torch while this process does
    from ddp_equivalence.commands.doctor.lane_states import lane_states

    states = list(lane_states())
    print("\n".join(doctor_lines(states)))
    return DIFFERENT if any(state.works is False for state in states) else SAME


def doctor_lines(states: Sequence[LaneState]) -> Iterator[str]:
    """The versions and devices of this machine, and one line for each lane."""
    from ddp_equivalence.report.versions import versions

    installed = versions()
    yield (
        f"ddp_equivalence {installed['ddp_equivalence']}, torch {installed['torch']}, "
        f"Python {installed['python']}"
    )
    yield f"{installed['platform']}, {os.cpu_count()} CPU cores"
    devices = installed["cuda_devices"]
    cuda = f" (CUDA {installed['cuda']}, NCCL {installed['nccl']})" if devices else ""
    yield f"CUDA devices: {devices}{cuda}"
    yield ""
    yield "Lanes, each with 2 ranks and collectives with known answers"
    for state in states:
        yield f"  {state.name:<15}{WORDS[state.works]:<7}{state.text}"
    if not devices:
        yield ""
        yield (
            "Cases that would run on NCCL run on gloo and the CPU instead, and are marked "
            "gloo_fallback."
        )
