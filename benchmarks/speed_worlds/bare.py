"""The floor: the checks back to back on bare ranks, with nothing around them.

The judging process hands every rank the seed, computes the big batch while the ranks work, and
compares the one vector that each sends back.
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
from the_check import CHECKS, RANKS, assert_same, big_batch, distributed, join_group


def work(rank: int, rendezvous: str, connections: list[Connection]) -> None:
    """What a rank does until it is told to stop."""
    join_group(rank, rendezvous)
    connection = connections[rank]
    while (seed := connection.recv()) is not None:
        connection.send_bytes(distributed(seed, rank).numpy())
    # Taking the group apart has its own deadlocks; the kernel does it better.
    os._exit(0)


@contextmanager
def bare_ranks() -> Iterator[tuple[Connection, ...]]:
    """A connection to every rank, until the end of the block."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [multiprocessing.Pipe() for _ in range(RANKS)]
        ours, theirs = zip(*pipes, strict=True)
        # daemon: they are ended if a check fails here.
        arguments = f"{folder}/store", theirs
        ranks = multiprocessing.spawn(work, arguments, RANKS, join=False, daemon=True)
        yield ours
        for connection in ours:
            connection.send(None)
        ranks.join()


def check(seed: int, ranks: tuple[Connection, ...]) -> None:
    """One check; raises if a gradient of a rank is another one than the big batch's."""
    for connection in ranks:
        connection.send(seed)
    expected = big_batch(seed)
    for connection in ranks:
        received = bytearray(connection.recv_bytes())
        assert_same(torch.frombuffer(received, dtype=torch.float64), expected)


def main() -> None:
    """Run the checks, and write when each began."""
    starts = []
    first_comparison = 0.0
    with bare_ranks() as ranks:
        for seed in range(CHECKS):
            starts.append(time.monotonic())
            check(seed, ranks)
            first_comparison = first_comparison or time.monotonic()
    times = {"starts": starts, "first_comparison": first_comparison, "passed": CHECKS}
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
