"""The command line: a thin front to the functions that the tests call."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddp_equivalence import session
from ddp_equivalence.commands import sandbox
from ddp_equivalence.errors import BadCase
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.terminal import painted, width_of

if TYPE_CHECKING:
    from ddp_equivalence.verdict import Verdict

SAME, DIFFERENT, BAD_INPUT, NOT_JUDGED = 0, 1, 2, 3
INTERRUPTED = 130
EXIT_CODE = {"same": SAME, "different": DIFFERENT, "unknown": NOT_JUDGED}

OPTIONS = (
    *("backend", "compare", "steps", "lr", "deadline", "collective_deadline"),
    *("in_process", "allow_changes"),
)
"""Of the command line that are arguments of check() under the same name."""

DTYPES = ("float64", "float32", "bfloat16", "float16", "as-built")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and known.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if known.command == "run":
            _run(known, rest)
        if known.command == "sandbox":
            return sandbox.run(known)
        if known.command in ("explore", "faults"):
            return {"explore": _explore, "faults": _faults}[known.command](known)
        target = _target(known.target) if known.command == "check" else None
        start_early()  # imports torch while this process does
        return _doctor() if target is None else _check(known, *target)
    except BadCase as error:
        print(f"ddp-equivalence {known.command}: bad input\n  {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _stop_ranks()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp-equivalence",
        description="Does data-parallel training compute the gradients of one big batch?",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run the suite on this machine and print the table",
        description="Run the suite on this machine and print what was compared with one big batch. "
        "Every other argument goes to pytest: -k ddp_mean, -n 2, -x.",
        allow_abbrev=False,
    )
    run.add_argument("--json", type=Path, metavar="PATH", help="write machine-readable results")
    run.add_argument(
        "--must-run",
        action="append",
        default=[],
        metavar="LANE",
        help="fail unless something was compared on this lane, such as nccl or data_parallel",
    )
    check = commands.add_parser(
        "check",
        help="check your own case and step",
        description="Compare what your own training step leaves on every rank with one big batch. "
        "Exit code 0: same, 1: different, 2: bad input, 3: could not be judged.",
    )
    check.add_argument(
        "target",
        metavar="FILE.py[:NAME]",
        help="a file with `case = Case(...)` and `def step(model, shard, rank)`; NAME is another "
        "step in it, a tuple (case, step, options), or a strategy such as ddp_mean",
    )
    for name in ("layout", "shards"):
        check.add_argument(f"--{name}", help=f"replaces the {name} of the case")
    check.add_argument("--dtype", choices=DTYPES, help="replaces the dtype of the case")
    check.add_argument("--seed", type=int, help="replaces the seed of the case")
    check.add_argument(
        "--examples",
        metavar="N or 0,1,5",
        help="takes the first N examples of the batch, or those at these positions",
    )
    check.add_argument(
        "--explore",
        type=int,
        metavar="N",
        help="try N variations of the case, in everything that no other option gives, and shrink "
        "what is not the same to the smallest such case",
    )
    check.add_argument("--backend", help="auto, gloo, gloo_cuda, nccl, nccl2 or nccl-legacy")
    check.add_argument("--compare", help="gradients or update")
    check.add_argument("--steps", type=int, help="consecutive big batches in the batch")
    check.add_argument("--lr", type=float, help="learning rate of the reference's SGD")
    check.add_argument("--deadline", type=float, metavar="SECONDS", help="time the ranks get")
    check.add_argument(
        "--collective-deadline", type=float, metavar="SECONDS", help="time one collective gets"
    )
    check.add_argument(
        "--in-process",
        action="store_true",
        default=None,
        help="rank 0 is this process, without a deadline: breakpoint() works in the step",
    )
    check.add_argument(
        "--allow-changes",
        action="store_true",
        default=None,
        help="the step may change its process: seed, environment, default dtype, threads ...",
    )
    check.add_argument(
        "--export-repro",
        type=Path,
        metavar="DIR",
        help="if it differs, write one plain torch script that shows it, for a bug report",
    )
    explore = commands.add_parser(
        "explore",
        help="try random cases of the suite itself",
        description="Try random cases on which the suite promises the big batch, and shrink each "
        "false alarm to its smallest case. Exit code 0: none, 1: some.",
    )
    explore.add_argument("--right", type=int, default=2000, metavar="N", help="default 2000")
    explore.add_argument(
        "--wrong", type=int, default=0, metavar="N", help="and this many known differences"
    )
    explore.add_argument("--seed", type=int, default=0, help="draws other cases")
    explore.add_argument("--json", type=Path, metavar="PATH", help="write machine-readable results")
    faults = commands.add_parser(
        "faults",
        help="break training in every known way, and see each caught and named",
        description="Plant known faults in real strategies on real ranks, and print which are "
        "caught and named, and which other checks would have noticed. Exit code 0: all; 1: not.",
    )
    faults.add_argument("names", nargs="*", metavar="NAME", help="these faults only")
    faults.add_argument("--list", action="store_true", help="say what each fault breaks")
    faults.add_argument("--layout", action="append", help="on this layout only; may be repeated")
    faults.add_argument(
        "--every", action="store_true", help="every model, loss and type on every layout: minutes"
    )
    faults.add_argument(
        "--right",
        type=int,
        default=0,
        metavar="N",
        help="and this many random cases that are right, none of which may be called wrong",
    )
    faults.add_argument(
        "--sensitivity",
        action="store_true",
        help="instead: the smallest factor and wrong element that is caught, by type",
    )
    sandbox.add(commands)
    commands.add_parser("doctor", help="say what this machine can run, and why not the rest")
    return parser


def _run(known: argparse.Namespace, rest: list[str]) -> NoReturn:
    from ddp_equivalence.suite_folder import is_checkout, suite_folder

    # Paths are the caller's own; what is not there is meant within the suite.
    given = [_absolute(one, before) for one, before in zip(rest, ["", *rest], strict=False)]
    arguments = [
        "-o",
        "testpaths=tests/equivalence tests/difference",
        "--ddp-require-comparison",
        "--ddp-repeat-with=ddp-equivalence run",
        *(f"--must-run={lane}" for lane in known.must_run),
        *given,
    ]
    if known.json is not None:
        arguments.append(f"--ddp-json={known.json.resolve()}")
    if not is_checkout():
        cache = Path(tempfile.gettempdir()) / f"ddp_equivalence-pytest-cache-{os.getuid()}"
        arguments += ["-o", f"cache_dir={cache}"]
    os.chdir(suite_folder())
    # This process becomes pytest: one to interrupt, and nothing of the package imported before
    # pytest has seen it, which it warns of.
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


def _absolute(argument: str, before: str) -> str:
    path, separator, test = argument.partition("::")
    value_of_option = before.startswith("-") and "=" not in before
    if argument.startswith("-") or value_of_option or not Path(path).exists():
        return argument
    return f"{Path(path).resolve()}{separator}{test}"


def _target(text: str) -> tuple[Path, str]:
    """File and name of ``FILE.py`` or ``FILE.py:NAME``; told before anything slow is imported.

    Raises BadCase if there is no such file.
    """
    file, _, name = text.rpartition(":") if ".py:" in text else (text, "", "step")
    if not Path(file).is_file():
        raise BadCase("FILE", file, "a Python file that is there")
    return Path(file), name


def _check(known: argparse.Namespace, path: Path, name: str) -> int:
    from dataclasses import replace

    import torch

    from ddp_equivalence import selection
    from ddp_equivalence.user_file import load
    from ddp_equivalence.verdict import check

    try:
        found = load(path, name)
        changes = {
            field: getattr(known, field)
            for field in ("layout", "shards", "seed")
            if getattr(known, field) is not None
        }
        if known.dtype is not None:
            changes["dtype"] = None if known.dtype == "as-built" else getattr(torch, known.dtype)
        rest = {name: getattr(known, name) for name in OPTIONS if getattr(known, name) is not None}
        options = found.options | rest
        try:
            inspect.signature(check).bind(found.case, found.step, **options)
        except TypeError as error:
            raise BadCase("options", options, f"arguments of check(); {error}") from error
        examples = None if known.examples is None else selection.read(known.examples)
        if known.explore is not None:
            from ddp_equivalence.exploration.commands import explore_step

            given = changes if examples is None else changes | {"examples": examples}
            found = replace(found, options=options)
            outcome = explore_step(found, given, known.explore, known.target, rest)
            return EXIT_CODE[outcome]
        case = replace(found.case, **changes)
        case = case if examples is None else selection.with_examples(case, examples)
        verdict = check(case, found.step, **options)
    except BadCase:
        raise
    except Exception:
        # Neither same nor different: Python's own exit code 1 would say "different".
        traceback.print_exc()
        return NOT_JUDGED
    with session.using(session.replaced(width=width_of(sys.stdout, session.current().width))):
        print(painted(str(verdict), sys.stdout), end="")
    if known.export_repro is not None:
        print(_reproduction(verdict, found.step, options, known.export_repro))
    return EXIT_CODE[verdict.outcome]


def _faults(known: argparse.Namespace) -> int:
    start_early()
    from ddp_equivalence.faults import commands

    if known.list:
        return commands.list_faults()
    if known.sensitivity:
        return commands.print_sensitivity()
    bad = commands.print_table(known.names, known.layout, known.every)
    if known.right and not bad:
        from ddp_equivalence.exploration.commands import explore_suite

        bad = int(not explore_suite(known.right, 0, seed=0, results=None))
    return bad


def _explore(known: argparse.Namespace) -> int:
    start_early()
    from ddp_equivalence.exploration.commands import explore_suite

    right = explore_suite(known.right, known.wrong, known.seed, known.json)
    return SAME if right else DIFFERENT


def _reproduction(verdict: Verdict, step: Any, options: dict[str, Any], folder: Path) -> str:
    """Write the script if there is something to show; say what was written, or why nothing."""
    from ddp_equivalence.reproduction import command_of, export

    if verdict.outcome != "different" and verdict.failure is None:
        return f"reproduction: none, there is nothing to reproduce ({verdict.outcome})"
    of_export = {"compare", "lr", "steps", "backend"}
    options = {name: value for name, value in options.items() if name in of_export}
    headline = str(verdict).partition("\n")[0]
    try:
        path = export(verdict.case, step, folder, headline=headline, **options)
    except (BadCase, OSError) as error:
        return f"reproduction: none, {error}"
    return f"reproduction: {path} ({command_of(path)})"


def _doctor() -> int:
    from ddp_equivalence.doctor import lane_states, lines

    states = list(lane_states())
    print("\n".join(lines(states)))
    return int(any(state.works is False for state in states))


def _stop_ranks() -> None:
    """End the ranks now: what starts at exit could not be interrupted."""
    warm = sys.modules.get("ddp_equivalence.ranks.warm")
    if warm is not None:
        warm.warm_ranks().stop()


if __name__ == "__main__":
    raise SystemExit(main())
