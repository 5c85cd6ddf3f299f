"""What observing a script costs: time of a recorded step, time in all, and memory.

    python benchmarks/observed.py [--repeats 5]
    python benchmarks/observed.py --memory --millions 1000

The first prints ratios of medians: a step that is recorded against a step of the script alone, and
against one that also copies the weights and gradients to a file; and the whole command against the
script alone. The second prints the most memory that the script takes
alone, and with ``observe``: how much less the machine had available than before.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

PROGRAMS = Path(__file__).parent / "observed_programs"

STEPS = 12
"""The steps that the script makes. The three before the last one are recorded, and compared with
the same three of the script alone.
"""

ROWS = 32
"""The rows of a rank in a step where time is measured."""

FEW = 2
"""The steps and the rows where memory is measured, which depends on neither."""

GIB = 1 << 30


def script(millions: int, *words: str, steps: int = STEPS, rows: int = ROWS) -> list[str]:
    """The command that trains on two ranks."""
    numbers = map(str, (millions, steps, rows))
    return [sys.executable, "wide_model.py", *numbers, *words, "--nprocs", "2"]


def observed(command: list[str], *options: str) -> list[str]:
    """The command that observes it."""
    return [
        *(sys.executable, "-m", "ddp_equivalence", "observe", "--precision", "own"),
        *(*options, "--", *command),
    ]


def run(command: list[str]) -> tuple[float, str]:
    """The seconds that a command takes, and what it prints. Raises RuntimeError if it fails."""
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=PROGRAMS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - begun, done.stdout


def seconds_of_steps(printed: str) -> list[float]:
    """The seconds of each step that was printed."""
    return [float(one) for one in re.findall(r"seconds of a step: ([\d.]+)", printed)]


def compare_times(millions: int, repeats: int) -> None:
    """Print the ratios."""
    alone, with_copies, recorded, whole, whole_observed = [], [], [], [], []
    for _ in range(repeats):
        seconds, printed = run(script(millions))
        whole.append(seconds)
        alone.append(statistics.median(seconds_of_steps(printed)[-4:-1]))
        _, printed = run(script(millions, "copies"))
        with_copies.append(statistics.median(seconds_of_steps(printed)[-4:-1]))
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "kept"
            options = ("--from-step", str(STEPS - 4), "--steps", "3", "--keep", str(kept))
            seconds, _ = run(observed(script(millions), *options))
            whole_observed.append(seconds)
            (log,) = kept.glob("ranks_*/record.log")
            recorded.append(statistics.median(seconds_of_steps(log.read_text())[-3:]))
    step, copying, record = map(statistics.median, (alone, with_copies, recorded))
    print(f"{millions} million parameters, 2 ranks, {repeats} times, medians")
    print(f"a step alone: {step * 1000:.0f} ms; a recorded step: {record / step:.2f} times that")
    print(
        f"a step that also copies as much: {copying * 1000:.0f} ms; "
        f"a recorded step: {record / copying:.2f} times that"
    )
    ratio = statistics.median(whole_observed) / statistics.median(whole)
    print(f"the script alone: {statistics.median(whole):.1f} s; observed: {ratio:.2f} times that")


def memory_of(command: list[str]) -> tuple[float, float]:
    """How many GiB less are available while a command runs, and its seconds."""
    before = least = psutil.virtual_memory().available
    done = threading.Event()

    def sample() -> None:
        nonlocal least
        while not done.wait(0.1):
            least = min(least, psutil.virtual_memory().available)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        seconds, _ = run(command)
    finally:
        done.set()
        sampler.join()
    return (before - least) / GIB, seconds


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory", action="store_true", help="measure memory, not time")
    parser.add_argument("--millions", type=int, default=20, help="of parameters")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.memory:
        compare_times(arguments.millions, arguments.repeats)
        return
    command = script(arguments.millions, "bfloat16", steps=FEW, rows=FEW)
    for name, one in (("alone", command), ("observed", observed(command, "--steps", "1"))):
        gib, seconds = memory_of(one)
        what = f"{arguments.millions} million bfloat16, 2 ranks, {name}"
        print(f"{what}: {gib:.1f} GiB, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
