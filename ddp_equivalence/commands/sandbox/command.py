"""ddp-equivalence sandbox: the published toy problem, measured and in closed form."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, INTERRUPTED, NOT_JUDGED, SAME
from ddp_equivalence.commands.output import require_writable_file, write_json
from ddp_equivalence.ranks.failure import RankFailed

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.sandbox.table import FinishedRow
    from ddp_equivalence.commands.sandbox.training import Problem


# ``ddp-equivalence sandbox``: the published toy problem, measured and in closed form.

OF_A_SINGLE_RUN = ("lr", "batch_size", "n_epochs", "deterministic", "n_experiments", "ranks")
"""Options of single and multi. The table does not take them."""

TRUTHS = {"true": True, "false": False}


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "sandbox",
        help="run the published toy problem: one neuron on one process, or on many ranks",
        description="Train one neuron y = w x, which starts at w = 1, on 256 samples with L1 loss "
        "and plain SGD. Inputs are 1 and targets 0; standard normal noise is added to both unless "
        "--deterministic True. The command prints what was measured, the closed form, and whether "
        "they agree within 99.9 % intervals. This needs the extra `sandbox`. Exit code 0: all "
        "agree, 1: some do not, 2: bad input, 3: could not be judged.",
    )
    parser.add_argument(
        "mode", nargs="?", choices=("single", "multi"), help="one process, or many ranks"
    )
    _add_options_of_a_single_run(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the seed of the noise, default 0; the table has 31 intervals of 99.9 %%, so about 3 "
        "seeds in 100 print DIFFER by chance",
    )
    parser.add_argument("--table", action="store_true", help="run all nine published rows")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the rows of --table to this file, as JSON"
    )


def _add_options_of_a_single_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lr", type=float, help="the learning rate; default 1e-4")
    parser.add_argument(
        "--batch_size",
        "--batch-size",
        type=int,
        metavar="N",
        help="the batch size of each rank; default 16",
    )
    parser.add_argument(
        "--n_epochs",
        "--n-epochs",
        type=int,
        metavar="N",
        help="the number of epochs, each with noise of its own; default 1",
    )
    parser.add_argument(
        "--deterministic", metavar="True|False", help="True, the default, adds no noise"
    )
    parser.add_argument(
        "--n_experiments",
        "--n-experiments",
        type=int,
        metavar="N",
        help="the number of independent experiments; default 1, and with noise 10000 (the "
        "published script: 1)",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="the ranks of multi; default 8")
    parser.add_argument(
        "--as_published",
        "--as-published",
        action="store_true",
        help="run multi with the mistake of the published script, which calls the bare net",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run what the arguments ask for, and return the exit code.

    Raises BadCase, before anything runs, for arguments that cannot be right.
    """
    _check_arguments(arguments)
    try:
        if arguments.mode is not None:
            return _single_run(_problem(arguments), arguments.as_published)
        return _table(arguments.seed, arguments.json)
    except RankFailed as error:
        from ddp_equivalence.report.failure import failure_blocks

        for block in failure_blocks(error, "a rank failed", None):
            print("\n".join(line.text for line in block), file=sys.stderr)
        return NOT_JUDGED


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raises BadCase if options do not go together, or a package that they need is missing."""
    if (arguments.mode is None) == (not arguments.table):
        raise BadCase("sandbox", arguments.mode, "single, or multi, or --table")
    for name in OF_A_SINGLE_RUN:
        if arguments.mode is None and getattr(arguments, name) is not None:
            right = "given only with single or multi: the table uses the published values"
            raise BadCase(name, getattr(arguments, name), right)
    if arguments.ranks is not None and arguments.mode == "single":
        raise BadCase("ranks", arguments.ranks, "given only with multi: single is one process")
    if arguments.as_published and arguments.mode != "multi":
        raise BadCase(
            "as_published", True, "given only with multi: the mistake needs several ranks"
        )
    if arguments.json is not None and not arguments.table:
        raise BadCase("json", str(arguments.json), "given only with --table")
    require_writable_file("json", arguments.json)
    if not 0 <= arguments.seed < 2**62:
        raise BadCase("seed", arguments.seed, "an integer from 0, below 2**62")
    if arguments.mode is not None or arguments.table:
        require_scipy()


def _problem(arguments: argparse.Namespace) -> Problem:
    from ddp_equivalence.commands.sandbox.training import Problem

    given = {
        name: getattr(arguments, name)
        for name in OF_A_SINGLE_RUN
        if getattr(arguments, name) is not None
    }
    deterministic = TRUTHS.get(str(given.pop("deterministic", "True")).lower())
    if deterministic is None:
        raise BadCase("deterministic", arguments.deterministic, "True or False")
    defaults: dict[str, Any] = {
        "lr": 1e-4,
        "batch_size": 16,
        "n_experiments": 1 if deterministic else 10_000,
        "ranks": 8 if arguments.mode == "multi" else 1,
    }
    problem = Problem(**(defaults | given), deterministic=deterministic, seed=arguments.seed)
    if arguments.mode == "multi" and problem.ranks == 1:
        raise BadCase("ranks", 1, "2 or more for multi; one process is single")
    return problem


def _single_run(problem: Problem, as_published: bool) -> int:
    from ddp_equivalence.commands.sandbox.table import (
        result_lines,
        spread_lines,
        title,
        with_closed_form,
    )
    from ddp_equivalence.commands.sandbox.training import closed_form, train

    print(title(problem, as_published), flush=True)
    result, expected = train(problem, as_published, _progress("")), closed_form(problem)
    agreements = with_closed_form(result, expected)
    for line in ("", *result_lines(problem, result, expected, agreements)):
        print(line)
    if problem.ranks > 1:
        for line in spread_lines(problem, result):
            print(line)
    named = _print_named(problem) if as_published else True
    holds = [one.holds for one in agreements]
    if False in holds or result.spread or not named or as_published:
        return DIFFERENT
    return NOT_JUDGED if None in holds else SAME


def _print_named(problem: Problem) -> bool:
    """Print how the suite names the published script's mistake. True if it names the right one."""
    from ddp_equivalence.checking.check import check
    from ddp_equivalence.commands.sandbox.training import as_published, case_of

    verdict = check(case_of(problem), as_published, backend="gloo")
    print("\nThe suite's report on the first step of this run, with noise:\n")
    print(str(verdict), end="")
    return verdict.cause == "raw_module_called"


def _table(seed: int, path: Path | None) -> int:
    from ddp_equivalence.commands.sandbox import table
    from ddp_equivalence.commands.sandbox.table import ROWS

    rows: list[FinishedRow] = []
    interrupted = False
    try:
        print("\n".join(table.head_lines()), flush=True)
        for number, row in enumerate(ROWS, start=1):
            progress = _progress(f"row {number} of {len(ROWS)}, ")
            finished = table.run_row(row.seeded(seed), progress)
            rows.append(finished)
            print("\n".join(table.row_lines(finished)), flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted: {len(rows)} of {len(ROWS)} rows done")
    except RankFailed:
        print(f"\n{len(rows)} of {len(ROWS)} rows done", flush=True)
        raise
    else:
        print("\n".join(table.foot_lines(rows)), flush=True)
    finally:
        write_json("json", path, table.as_json(rows, seed, interrupted))
    if interrupted:
        return INTERRUPTED
    return DIFFERENT if any(row.wrong for row in rows) else SAME


def _progress(before: str) -> Any:
    """Print the progress on one line of a terminal, and overwrite it; print nothing elsewhere."""

    def tell(done: int, of: int) -> None:
        if sys.stderr.isatty():
            end = "\r" + " " * 60 + "\r" if done == of else ""
            print(f"\r{before}{done} of {of} blocks{end}", end="", file=sys.stderr, flush=True)

    return tell


# The package that the sandbox needs, and that only an optional extra installs.


def require_scipy() -> None:
    """Raises BadCase if scipy, which computes the intervals, is not installed."""
    if find_spec("scipy") is None:
        right = "an installed scipy: pip install 'ddp_equivalence[sandbox]'"
        raise BadCase("sandbox", "no scipy", right)
