"""The floor: bare ranks make DDP's step, and this process compares their gradients.

This process computes the big batch while the ranks work. Then every rank sends its gradients
through a pipe, parameter by parameter, so that only one is held at a time. With
BENCHMARK_COMPARE=0 nothing is sent and compared. With BENCHMARK_IN_TURN=1 the big batch comes
first, and its gradients are kept in the dtype of the model.
"""

from __future__ import annotations

import ctypes
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
    IN_TURN,
    PARAMETERS,
    RANKS,
    WARM_UP,
    build,
    loss,
    peak_bytes,
    width_of,
)
from chain import step as train
from torch import Tensor, nn

COMPARE = os.environ["BENCHMARK_COMPARE"] == "1"
LIMIT = {torch.float64: 1e-11, torch.float32: 1e-3}[DTYPE]
"""The limit of the error of a parameter's gradient, relative to the gradient's norm."""

PEAK = -1
"""Is sent to a rank instead of a number of parameters, to ask for the rank's peak memory."""


def build_all(parameters: int) -> tuple[nn.Module, Tensor]:
    """The model and the big batch, the same in every process."""
    torch.default_generator.manual_seed(0)
    model = build(parameters)
    return model, torch.randn(EXAMPLES, width_of(parameters), dtype=DTYPE)


def work(rank: int, rendezvous: str, connections: list[Connection]) -> None:
    """Make a step for every number of parameters that arrives, until None arrives."""
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    connection = connections[rank]
    while (request := connection.recv()) is not None:
        if request == PEAK:
            connection.send(peak_bytes())
        else:
            step(rank, request, connection)
    # Destroying the group can deadlock, so the process just ends.
    os._exit(0)


def step(rank: int, parameters: int, connection: Connection) -> None:
    """Make one distributed step, and send the gradients, or a message that it is done."""
    model, rows = build_all(parameters)
    each = EXAMPLES // RANKS
    train(model, rows[rank * each : (rank + 1) * each])
    if not COMPARE:
        connection.send_bytes(b"done")
        return
    for parameter in model.parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        connection.send_bytes(whole.reshape(-1).numpy())


def big_batch(parameters: int) -> dict[str, Tensor]:
    """The gradients of the big batch, by name."""
    model, rows = build_all(parameters)
    model, rows = model.double(), rows.double()
    loss(model, rows).backward()
    kept = DTYPE if IN_TURN else torch.float64
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad.to(kept), None
    del model, parameter
    ctypes.CDLL(None).malloc_trim(0)
    return found


def check(parameters: int, connections: list[Connection]) -> None:
    """Make one check; raise AssertionError if a rank has another gradient than the big batch."""
    if not IN_TURN:
        for connection in connections:
            connection.send(parameters)
    expected = big_batch(parameters)
    if IN_TURN:
        for connection in connections:
            connection.send(parameters)
    if not COMPARE:
        for connection in connections:
            connection.recv_bytes()
        return
    buffer = bytearray(max(one.numel() for one in expected.values()) * DTYPE.itemsize)
    for name, gradient in expected.items():
        right = gradient.reshape(-1).double()
        norm = right.norm()
        for rank, connection in enumerate(connections):
            connection.recv_bytes_into(buffer)
            measured = torch.frombuffer(buffer, dtype=DTYPE, count=right.numel()).double()
            error = (measured.sub_(right).norm() / norm).item()
            if not error <= LIMIT:
                raise AssertionError(f"{name} on rank {rank}: error {error:.1e}")


def peaks(connections: list[Connection]) -> tuple[int, int]:
    """The peak memory of this process, and the largest of all ranks."""
    for connection in connections:
        connection.send(PEAK)
    return peak_bytes(), max(connection.recv() for connection in connections)


def main() -> None:
    """Run the checks, and write their seconds and the peak memory."""
    # Use the cores that the ranks leave. More threads than cores would wait for each other.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - RANKS))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(RANKS)), strict=True)
        # Daemons end with this process if a check fails.
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
