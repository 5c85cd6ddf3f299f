"""``ddp-equivalence doctor``: what this machine can run, and why not the rest."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ddp_equivalence.ranks.server import start_early

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    commands.add_parser("doctor", help="say what this machine can run, and why not the rest")


def run(known: argparse.Namespace) -> int:
    """Try every lane."""
    start_early()  # imports torch while this process does
    from ddp_equivalence.commands.doctor.lane_states import lane_states, lines

    states = list(lane_states())
    print("\n".join(lines(states)))
    return int(any(state.works is False for state in states))
