"""The floor: the big batch here, DDP's step on two bare ranks, gradients compared as they come.

The judging process computes the big batch while the ranks work. Then each sends one parameter's
gradient after the other through its pipe, and only one of them is held at a time.
BENCHMARK_COMPARE=0 leaves out the sending and the comparing.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from chain import (
    CHECKS,
    DTYPE,
    EXAMPLES,
    PARAMETERS,
    RANKS,
    WARM_UP,
    build,
    loss,
    peak_bytes,
    width_of,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

COMPARE = os.environ["BENCHMARK_COMPARE"] == "1"
LIMIT = {torch.float64: 1e-11, torch.float32: 1e-3}[DTYPE]
"""Of the error of a parameter's gradient over its norm."""

PEAK = -1
"""Sent instead of a number of parameters: asks for the rank's peak memory."""


def build_all(parameters: int) -> tuple[nn.Module, Tensor]:
    """Model and big batch, the same in every process."""
    torch.default_generator.manual_seed(0)
    model = build(parameters)
    return model, torch.randn(EXAMPLES, width_of(parameters), dtype=DTYPE)


def work(rank: int, rendezvous: str, connections: list[Connection]) -> None:
    """What a rank does until it is told to stop."""
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    connection = connections[rank]
    while (wanted := connection.recv()) is not None:
        if wanted == PEAK:
            connection.send(peak_bytes())
        else:
            step(rank, wanted, connection)
    # Taking the group apart has its own deadlocks; the kernel does it better.
    os._exit(0)


def step(rank: int, parameters: int, connection: Connection) -> None:
    """One distributed step; sends the gradients, or else that it is done."""
    model, rows = build_all(parameters)
    each = EXAMPLES // RANKS
    ddp = DistributedDataParallel(model)
    loss(ddp, rows[rank * each : (rank + 1) * each]).backward()
    if not COMPARE:
        connection.send_bytes(b"done")
        return
    for parameter in model.parameters():
        connection.send_bytes(parameter.grad.reshape(-1).numpy())


def check(parameters: int, connections: list[Connection]) -> None:
    """One check; raises if a gradient of a rank is another one than the big batch's."""
    for connection in connections:
        connection.send(parameters)
    model, rows = build_all(parameters)
    model, rows = model.double(), rows.double()
    loss(model, rows).backward()
    if not COMPARE:
        for connection in connections:
            connection.recv_bytes()
        return
    buffer = bytearray(max(p.numel() for p in model.parameters()) * DTYPE.itemsize)
    for name, parameter in model.named_parameters():
        expected = parameter.grad.reshape(-1)
        norm = expected.norm()
        for rank, connection in enumerate(connections):
            connection.recv_bytes_into(buffer)
            measured = torch.frombuffer(buffer, dtype=DTYPE, count=expected.numel()).double()
            error = (measured.sub_(expected).norm() / norm).item()
            if not error <= LIMIT:
                raise AssertionError(f"{name} on rank {rank}: error {error:.1e}")


def peaks(connections: list[Connection]) -> tuple[int, int]:
    """The most that the judging process, and that any rank, has held so far."""
    for connection in connections:
        connection.send(PEAK)
    return peak_bytes(), max(connection.recv() for connection in connections)


def main() -> None:
    """Run the checks, and write what they took."""
    # The cores that the ranks leave: more threads than cores wait for each other in turns.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - RANKS))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(RANKS)), strict=True)
        # daemon: they are ended if a check fails here.
        arguments = f"{folder}/store", theirs
        ranks = multiprocessing.spawn(work, arguments, RANKS, join=False, daemon=True)
        check(WARM_UP, ours)
        before = peaks(ours)
        for _ in range(CHECKS):
            started = time.monotonic()
            check(PARAMETERS, ours)
            seconds.append(time.monotonic() - started)
        after = peaks(ours)
        for connection in ours:
            connection.send(None)
        ranks.join()
    result = {"seconds": seconds, "before": before, "after": after}
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
