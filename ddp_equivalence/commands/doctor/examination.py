"""Asks every part of the machine its question, and says each answer as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.commands.doctor.gpu_states import (
    GpuState,
    PairState,
    all_together,
    gpu_states,
    pair_states,
)
from ddp_equivalence.commands.doctor.lane_states import lane_states
from ddp_equivalence.commands.doctor.machine import Machine
from ddp_equivalence.commands.doctor.node_state import node_state
from ddp_equivalence.commands.doctor.problem import Problem
from ddp_equivalence.commands.doctor.problems import problems
from ddp_equivalence.commands.doctor.state import Outcome, State
from ddp_equivalence.ranks.lanes import missing

NAME_WIDTH = 22
OUTCOME_WIDTH = 9


class Examination:
    """``gpus``, ``pairs`` and ``others`` are the states found so far; ``lines`` finds them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.gpus: list[GpuState] = []
        self.pairs: list[PairState] = []
        self.others: list[State] = []

    @property
    def states(self) -> list[State]:
        """All states, in the order in which they were found."""
        of_gpus = [gpu.state for gpu in self.gpus]
        return [*of_gpus, *(pair.state for pair in self.pairs), *self.others]

    def problems(self) -> list[Problem]:
        """The problems that the machine's facts and the states show."""
        return list(problems(self.machine, self.gpus, self.pairs, self.others))

    def lines(self) -> Iterator[str]:
        """Ask the GPUs, their pairs, and the lanes. Yields a line for each, under headings."""
        if self.machine.devices:
            yield from self._not_described()
            yield "Each GPU alone: start CUDA, and multiply two matrices"
            for gpu in gpu_states(self.machine.devices):
                self.gpus.append(gpu)
                yield _line(gpu.state)
            yield ""
        if len(self.machine.devices) > 1:
            yield "Pairs of GPUs, and all together: sum 16 MiB by NCCL (GB/s: busbw of nccl-tests)"
            yield from self._together()
            yield ""
        yield (
            "Lanes: collectives with known answers; NCCL has a rank on each GPU, nccl_shared and "
            "gloo have 2 ranks"
        )
        for lane in lane_states(self.machine):
            self.others.append(lane)
            yield _line(lane)

    def _not_described(self) -> Iterator[str]:
        """What nobody could say of the GPUs, and why."""
        if self.machine.gpus.problem:
            what = "driver, free memory, compute mode, MIG and P2P of the GPUs"
            self.others.append(
                State("NVML", Outcome.NOT_RUN, f"{what}: {self.machine.gpus.problem}")
            )
            yield _line(self.others[-1])
            yield ""

    def _together(self) -> Iterator[str]:
        working = [gpu for gpu in self.gpus if gpu.state.outcome is Outcome.WORKS]
        reason = missing("nccl", 2)
        if reason is None and len(working) < 2:
            verb = "works" if len(working) == 1 else "work"
            reason = f"of {len(self.gpus)} GPUs, {len(working)} {verb} alone"
        if reason is not None:
            self.others.append(State("pairs", Outcome.NOT_RUN, reason))
            yield _line(self.others[-1])
            return
        for pair in pair_states(self.gpus, self.machine.gpus):
            self.pairs.append(pair)
            yield _line(pair.state)
        if len(working) > 2:  # the sum over two GPUs is that of their pair
            self.others.append(all_together(self.gpus))
            yield _line(self.others[-1])
        self.others.append(node_state())
        yield _line(self.others[-1])


def _line(state: State) -> str:
    return f"  {state.name:<{NAME_WIDTH}}{state.outcome:<{OUTCOME_WIDTH}}{state.text}"
