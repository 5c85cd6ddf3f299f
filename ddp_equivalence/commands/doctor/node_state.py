"""Does NCCL take simulated nodes for hosts, as checks on layouts such as 2x2 rely on?"""

from __future__ import annotations

import os

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.commands.doctor.state import Outcome, State
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.nccl_nodes import nodes_counted

NAME = "nodes"


def node_state() -> State:
    """Let NCCL count the nodes of two ranks on two simulated nodes."""
    if "NCCL_HOSTID" in os.environ:
        return State(NAME, Outcome.NOT_RUN, "NCCL_HOSTID is set, so that NCCL sees one host")
    layout = parse("2x1")
    try:
        counted = nodes_counted(layout)
    except RankFailed as error:
        timed_out = isinstance(error, RanksTimedOut)
        return State(NAME, Outcome.FAILED, str(error).splitlines()[0], str(error), timed_out)
    if counted is None:
        return State(NAME, Outcome.NOT_RUN, "NCCL's log does not say how many nodes it counts")
    text = f"NCCL counts {counted} of {layout.nodes} simulated nodes"
    return State(NAME, Outcome.WORKS if counted == layout.nodes else Outcome.WRONG, text)
