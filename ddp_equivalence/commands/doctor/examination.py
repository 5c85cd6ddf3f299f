"""Asks every part of the machine its question, and says each answer as soon as it is there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.commands.doctor import on_rank
from ddp_equivalence.commands.doctor.machine import (
    Machine,
    Outcome,
    State,
    all_together,
    gpu_states,
    pair_states,
)
from ddp_equivalence.commands.doctor.on_rank import ask_ranks
from ddp_equivalence.ranks import probe
from ddp_equivalence.ranks.backend_names import LANES, NCCL_BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpus import visible_gpus
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, missing, shared_lane
from ddp_equivalence.ranks.nccl import nodes_counted
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from ddp_equivalence.report.text import plural


def examine(machine: Machine) -> Iterator[str | State]:
    """Ask the GPUs, their pairs, and the lanes. Yields headings, and below each the states, each as
    soon as it is known.
    """
    gpus: list[State] = []
    if machine.devices:
        if machine.gpus.problem:
            what = "driver, free memory, compute mode, MIG and P2P of the GPUs"
            yield State("NVML", Outcome.NOT_RUN, f"{what}: {machine.gpus.problem}")
            yield ""
        yield "Each GPU alone: start CUDA, and multiply two matrices"
        for gpu in gpu_states(machine.devices):
            gpus.append(gpu)
            yield gpu
        yield ""
    if len(machine.devices) > 1:
        yield "Pairs of GPUs, and all together: sum 16 MiB by NCCL (GB/s: busbw of nccl-tests)"
        yield from _together(machine, gpus)
        yield ""
    yield (
        "Lanes: collectives with known answers; NCCL has a rank on each GPU, nccl_shared and gloo "
        "have 2 ranks"
    )
    yield from lane_states(machine)


def _together(machine: Machine, gpus: Sequence[State]) -> Iterator[State]:
    working = [gpu for gpu in gpus if gpu.outcome is Outcome.WORKS]
    reason = missing("nccl", 2)
    if reason is None and len(working) < 2:
        reason = (
            f"of {len(gpus)} GPUs, {len(working)} {plural(len(working), 'works', 'work')} alone"
        )
    if reason is not None:
        yield State("pairs", Outcome.NOT_RUN, reason)
        return
    yield from pair_states(gpus, machine.gpus)
    if len(working) > 2:  # the sum over two GPUs is that of their pair
        yield all_together(gpus)
    yield node_state()


# The state of every lane on this machine: it works, it gives wrong answers, or it cannot run.

DEADLINE = 30.0
"""The seconds for all answers of one lane. One collective gets half of them."""

LANES_TRIED = tuple(lane for lane in LANES if lane not in ("gloo", "emulated"))


def lane_states(machine: Machine) -> Iterator[State]:
    """Look at every lane. Where it can run, ask its collectives questions with known answers."""
    for name in LANES_TRIED:
        ranks = _ranks(name)
        # gloo lets ranks share a GPU, so one is enough for it.
        reason = missing(name, 1 if name == "gloo_cuda" else ranks)
        if reason is None and name == "gloo_cuda":
            reason = _why_ranks_cannot_share(machine)
        if reason is not None:
            yield State(name, Outcome.NOT_RUN, reason, error=reason)
        elif name.startswith("data_parallel"):
            yield _data_parallel(name)
        else:
            yield _probe(name, ranks)


def _why_ranks_cannot_share(machine: Machine) -> str | None:
    """The reason why 2 ranks cannot run on these GPUs. None if they can."""
    modes = [gpu.compute_mode for gpu in visible_gpus(machine.gpus.gpus, machine.visible)]
    if len(machine.devices) == 1 and modes == ["exclusive_process"]:
        return "the only GPU is in the compute mode EXCLUSIVE_PROCESS, so ranks cannot share it"
    return None


def _ranks(name: str) -> int:
    """NCCL gets a rank on every GPU; a single one is enough to ask whether it starts.

    On the other lanes there are 2, or 2 replicas, so that shared lanes are asked with one GPU.
    """
    return len(cuda_devices()) or 2 if name in NCCL_BACKENDS else 2


def _probe(name: str, count: int) -> State:
    device = "cpu" if name == "gloo_fallback" else "cuda"
    backend = "gloo" if name.startswith("gloo") else name
    layout = parse(f"1x{count}")
    lane = shared_lane(layout) if name == NCCL_SHARED else Lane(name, backend, device)
    began = time.monotonic()
    try:
        # Fresh ranks are stopped afterwards. Warm ones would be in the way of the next lane's
        # on a GPU that takes one process at a time.
        with warm_ranks().acquire(layout, lane, DEADLINE / 2, fresh=True) as ranks:
            seconds_to_start = time.monotonic() - began
            results = probe.probe_ranks(ranks, DEADLINE)
    except RankFailed as error:
        return State(name, Outcome.FAILED, str(error).splitlines()[0], str(error))
    wrong = [f"{result.collective} ({result.detail})" for result in results if result.wrong]
    if wrong:
        return State(name, Outcome.WRONG, f"wrong answers: {', '.join(wrong)}")
    right = sum(result.correct for result in results)
    ranks_text = "1 rank" if count == 1 else f"{count} ranks"
    text = f"{right} answers right, {ranks_text} started in {seconds_to_start:.1f} s"
    refused = probe.summarise_refusals(results)
    return State(name, Outcome.WORKS, f"{text}; refuses {refused}" if refused else text)


def _data_parallel(name: str) -> State:
    """One step in one process, over all GPUs, or with 2 replicas on the only one."""
    lane, devices = Lane(name, "gloo", "cuda"), cuda_devices()
    replicas = max(2, len(devices))
    answers = ask_ranks(lane, devices, on_rank.data_parallel_step, replicas, seconds=DEADLINE)
    if not answers.by_rank:
        text = answers.error.splitlines()[0]
        return State(name, Outcome.FAILED, text, answers.error)
    (wrong,) = answers.by_rank
    if wrong:
        return State(name, Outcome.WRONG, wrong)
    where = f"over {len(devices)} GPUs"
    if len(devices) == 1:
        where = f"with {replicas} replicas on one GPU"
    return State(name, Outcome.WORKS, f"the gradient of one step {where} is that of the big batch")


# Does NCCL take simulated nodes for hosts, as checks on layouts such as 2x2 rely on?

NAME = "nodes"


def node_state() -> State:
    """Let NCCL count the nodes of two ranks on two simulated nodes."""
    if "NCCL_HOSTID" in os.environ:
        return State(NAME, Outcome.NOT_RUN, "NCCL_HOSTID is set, so that NCCL sees one host")
    layout = parse("2x1")
    try:
        counted = nodes_counted(layout)
    except RankFailed as error:
        return State(NAME, Outcome.FAILED, str(error).splitlines()[0], str(error))
    if counted is None:
        return State(NAME, Outcome.NOT_RUN, "NCCL's log does not say how many nodes it counts")
    text = f"NCCL counts {counted} of {layout.nodes} simulated nodes"
    return State(NAME, Outcome.WORKS if counted == layout.nodes else Outcome.WRONG, text)
