"""The floor: the checks back to back on bare ranks, with nothing around them.

The judging process hands every rank the seed, computes the big batch while the ranks work, and
compares the one vector that each sends back.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
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


def main() -> None:
    """Run the checks, and write when each began."""
    torch.set_num_threads(1)
    starts = []
    first_comparison = 0.0
    with tempfile.TemporaryDirectory() as folder:
        pipes = [multiprocessing.Pipe() for _ in range(RANKS)]
        ours, theirs = zip(*pipes, strict=True)
        # daemon: they are ended if a check fails here.
        arguments = f"{folder}/store", theirs
        ranks = multiprocessing.spawn(work, arguments, RANKS, join=False, daemon=True)
        for seed in range(CHECKS):
            starts.append(time.monotonic())
            for connection in ours:
                connection.send(seed)
            expected = big_batch(seed)
            for connection in ours:
                received = bytearray(connection.recv_bytes())
                assert_same(torch.frombuffer(received, dtype=torch.float64), expected)
            first_comparison = first_comparison or time.monotonic()
        for connection in ours:
            connection.send(None)
        ranks.join()
    times = {"starts": starts, "first_comparison": first_comparison, "passed": CHECKS}
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
