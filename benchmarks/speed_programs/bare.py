"""The floor: bare ranks make one check after the other, without any harness.

This process sends every rank the seed, computes the big batch while the ranks work, and compares
the vector that each rank sends back.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from processor_time import check_begins, of_a_check
from the_check import CHECKS, RANKS, assert_same, big_batch, distributed, join_group


def work(rank: int, rendezvous: str, connections: list[Connection]) -> None:
    """Send back a gradient for every seed that arrives, until None arrives."""
    join_group(rank, rendezvous)
    connection = connections[rank]
    while (seed := connection.recv()) is not None:
        connection.send_bytes(distributed(seed, rank).numpy())
    # Destroying the group can deadlock, so the process just ends.
    os._exit(0)


@contextmanager
def bare_ranks() -> Iterator[tuple[Connection, ...]]:
    """Start the ranks, give a connection to each, and stop them at the end."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [multiprocessing.Pipe() for _ in range(RANKS)]
        ours, theirs = zip(*pipes, strict=True)
        # Daemons end with this process if a check fails.
        arguments = f"{folder}/store", theirs
        ranks = multiprocessing.spawn(work, arguments, RANKS, join=False, daemon=True)
        yield ours
        for connection in ours:
            connection.send(None)
        ranks.join()


def check(seed: int, ranks: tuple[Connection, ...]) -> None:
    """Make one check; raise AssertionError if a rank has another gradient than the big batch."""
    for connection in ranks:
        connection.send(seed)
    expected = big_batch(seed)
    for connection in ranks:
        received = bytearray(connection.recv_bytes())
        assert_same(torch.frombuffer(received, dtype=torch.float64), expected)


def main() -> None:
    """Run the checks, and write when each of them began."""
    starts = []
    first_comparison = 0.0
    with bare_ranks() as ranks:
        for seed in range(CHECKS):
            check_begins(seed)
            starts.append(time.monotonic())
            check(seed, ranks)
            first_comparison = first_comparison or time.monotonic()
    times = {
        "starts": starts,
        "first_comparison": first_comparison,
        "passed": CHECKS,
        "processor": of_a_check(),
    }
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
