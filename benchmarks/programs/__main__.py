"""Check all programs: is no wrong one called the same as one big batch, and no right one different?

    python benchmarks/programs [--right | --wrong] [--only NAME_OR_TOPIC ...] [--part 1/4]
                               [--json PATH] [--verify] [--list]

A program is a model, a batch, a loss and a training step as a user writes them. The files in
``right/`` and ``wrong/`` hold them, each with the outcome that was declared before the program was
run. The command prints how many programs had each outcome, and all that had another one than
declared; it exits with 1 if there are any. Where the cause of a wrong program was declared as well,
another name is a surprise, too. ``--verify`` runs the programs without this package, and
computes in plain torch how far their gradients are from those of the big batch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the ranks import the programs as benchmarks.programs

import torch  # noqa: E402

from benchmarks.programs.brute_force import verify  # noqa: E402
from benchmarks.programs.library_trainers import MISSING  # noqa: E402
from benchmarks.programs.program import Program, all_programs  # noqa: E402
from benchmarks.programs.run import run  # noqa: E402


def chosen(programs: list[Program], arguments: argparse.Namespace) -> list[Program]:
    """The programs that the options name."""
    if arguments.right or arguments.wrong:
        programs = [each for each in programs if each.right == arguments.right]
    if arguments.only:
        names = set(arguments.only)
        programs = [each for each in programs if {each.name, each.topic} & names]
    number, of = arguments.part
    return programs[number - 1 :: of]


def a_part(text: str) -> tuple[int, int]:
    """Read ``2/4``, the second of four parts."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError("two numbers such as 2/4, for the second of four parts")
    return int(number), int(of)


def main() -> int:
    """Run what the options name; return 1 if a program had another outcome than declared."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    side = parser.add_mutually_exclusive_group()
    side.add_argument("--right", action="store_true", help="run the right programs only")
    side.add_argument("--wrong", action="store_true", help="run the wrong programs only")
    parser.add_argument("--only", nargs="+", metavar="NAME_OR_TOPIC", help="run these only")
    parser.add_argument("--part", type=a_part, default=(1, 1), help="such as 2/4")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every result")
    parser.add_argument(
        "--verify", action="store_true", help="compute the errors without this package"
    )
    parser.add_argument("--list", action="store_true", help="print the programs, and run nothing")
    arguments = parser.parse_args()
    programs = chosen(all_programs(), arguments)
    if not programs:
        parser.error("no program has this name or topic; --list prints them")
    torch.set_num_threads(1)
    if arguments.list:
        for each in programs:
            kind = "right" if each.right else "wrong"
            print(f"{kind}  {each.topic:<12} {each.name}: {each.sentence}")
        return 0
    if arguments.verify:
        return verify(programs)
    surprises = run(programs, arguments.json)
    if MISSING:
        print(f'Not run: programs of {", ".join(MISSING)}; pip install ".[trainers]"')
    return surprises


if __name__ == "__main__":
    sys.exit(main())
