"""Seconds and peak memory of a check of a large model, over the same on bare ranks.

    python benchmarks/large_model.py [--parameters 100000000] [--dtype float64] [--repeats 3]
                                     [--step ddp] [--in-turn]

Two ranks with one thread each. The floor (``benchmarks/large_programs/bare.py``) is the big batch
in one process and DDP's step on two others. It runs with and without comparing every gradient;
without, it takes the time that any check has to wait. The floor and this suite take turns, each
time in new processes, and the medians are printed. Memory is the peak of a process, above its peak
after a small check.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from statistics import median

from measured_process import (
    BENCHMARKS,
    Finished,
    ProgramFailed,
    end_with_sigterm,
    machine,
    run_program,
    whole_number,
)

RANKS = 2
SECONDS_A_CHECK = 900.0
"""A check that takes longer hangs, which is a failure."""


@dataclass(frozen=True)
class Program:
    """A program that makes the check; ``compare`` is 1 if it compares the gradients, else 0."""

    name: str
    file: str
    compare: int = 1


BARE_STEP = Program("bare ranks, not compared", "bare.py", compare=0)
BARE = Program("bare ranks, compared (floor)", "bare.py")
SUITE = Program("this suite", "suite.py")
PROGRAMS = (BARE_STEP, BARE, SUITE)


@dataclass
class Row:
    """The measurements of one program: the seconds of each check, and the bytes of each run."""

    seconds: list[float] = field(default_factory=list)
    judging: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)


def run(
    program: Program, parameters: int, dtype: str, checks: int, step: str, in_turn: bool
) -> Finished:
    """Run the checks, after one that does not count. Raises ProgramFailed."""
    folder = BENCHMARKS / "large_programs"
    files = {name: folder / name for name in ("chain.py", program.file)}
    settings = {
        "PARAMETERS": parameters,
        "DTYPE": dtype,
        "CHECKS": checks,
        "COMPARE": program.compare,
        "STEP": step,
        "IN_TURN": int(in_turn),
    }
    return run_program(files, [program.file], settings, SECONDS_A_CHECK * (checks + 1))


def main() -> int:
    """Print one line for every program; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=whole_number(1000), default=100_000_000)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--repeats", type=whole_number(1), default=3)
    parser.add_argument("--step", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="the floor, too, computes the big batch before the ranks work, for models of which "
        "both do not fit into memory together",
    )
    arguments = parser.parse_args()
    end_with_sigterm()
    print(machine(), flush=True)
    rows = {program: Row() for program in PROGRAMS}
    last: Finished | None = None
    for turn in range(arguments.repeats):
        for program, row in rows.items():
            print(f"{turn + 1} of {arguments.repeats}: {program.name}", file=sys.stderr, flush=True)
            try:
                last = run(
                    program,
                    arguments.parameters,
                    arguments.dtype,
                    checks=1,
                    step=arguments.step,
                    in_turn=arguments.in_turn,
                )
            except ProgramFailed as error:
                print(f"{program.name} FAILED: {error}", file=sys.stderr)
                return 1
            row.seconds += last.result["seconds"]
            judging, rank = (
                after - before
                for after, before in zip(last.result["after"], last.result["before"], strict=True)
            )
            row.judging.append(judging)
            row.rank.append(rank)
    assert last is not None  # The suite runs last.
    result = last.result
    copy = result["elements"] * (8 if arguments.dtype == "float64" else 4)
    print(
        f"{result['elements']:,} parameters on {RANKS} ranks, {arguments.step}, "
        f"{arguments.dtype}; one copy of the "
        f"gradients is {copy / 2**20:.0f} MiB; medians of {arguments.repeats}"
    )
    print(f"outcome same: error {result['error']:.1e}, limit {result['limit']:.1e}")
    print(
        "                              seconds  over floor   peak of judging process"
        "          peak of a rank"
    )
    floor = median(rows[BARE].seconds)
    for program, row in rows.items():
        memory = "".join(
            f"{most / 2**20:>12.0f} MiB{most / copy:>5.2f} copies"
            for most in (median(row.judging), median(row.rank))
        )
        seconds = median(row.seconds)
        print(f"{program.name:<28}{seconds:>9.2f}{seconds / floor:>12.2f}  {memory}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
