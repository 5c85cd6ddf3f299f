"""``ddp-equivalence sandbox``: the published toy problem, measured and in closed form."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, INTERRUPTED, NOT_JUDGED, SAME
from ddp_equivalence.commands.results import look_at_file, look_at_folder, write_json
from ddp_equivalence.ranks.failure import RankFailed

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.sandbox.problem import Setup
    from ddp_equivalence.commands.sandbox.table import Done

OF_ONE_RUN = ("lr", "batch_size", "n_epochs", "deterministic", "n_experiments", "ranks")
"""Options that belong to single and multi, and not to the table or the plots."""

TRUTHS = {"true": True, "false": False}


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "sandbox",
        help="run the published toy problem: one neuron on one process, or on many ranks",
        description="One neuron y = w x, w = 1 at the start, 256 samples, inputs 1, targets 0, L1 "
        "loss, plain SGD; standard normal noise on every input and target unless --deterministic "
        "True. Prints what was measured, the closed form, and whether they agree within 99.9 % "
        "intervals. Exit code 0: all agree, 1: some do not, 2: bad input, 3: could not be judged.",
    )
    parser.add_argument(
        "mode", nargs="?", choices=("single", "multi"), help="one process, or ranks"
    )
    parser.add_argument("--lr", type=float, help="learning rate, default 1e-3")
    parser.add_argument(
        "--batch_size", "--batch-size", type=int, metavar="N", help="per rank, default 16"
    )
    parser.add_argument(
        "--n_epochs",
        "--n-epochs",
        type=int,
        metavar="N",
        help="default 1; each epoch has noise of its own",
    )
    parser.add_argument(
        "--deterministic", metavar="True|False", help="True: no noise; default False"
    )
    parser.add_argument(
        "--n_experiments",
        "--n-experiments",
        type=int,
        metavar="N",
        help="default 10000, without noise 1",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="of multi, default 8")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the noise, default 0; with 31 intervals of 99.9 %%, about 3 seeds in 100 say "
        "DIFFER by chance",
    )
    parser.add_argument(
        "--as_published",
        "--as-published",
        action="store_true",
        help="multi with the published script's own mistake: it calls the bare net",
    )
    parser.add_argument("--table", action="store_true", help="run all nine published rows")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw two plots (SVG) into DIR")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="with --table: write the rows that were run"
    )


def run(known: argparse.Namespace) -> int:
    """Do what was asked; the exit code is returned. Raises BadCase before anything runs."""
    _look_at(known)
    try:
        if known.mode is not None:
            return _one(_setup(known), known.as_published)
        code = _table(known.seed, known.json) if known.table else SAME
        if known.plot is not None and code != INTERRUPTED:
            from ddp_equivalence.commands.sandbox.plot import draw

            for path in draw(known.plot, known.seed):
                print(path)
        return code
    except RankFailed as error:
        from ddp_equivalence.report.failure import failure_blocks

        for block in failure_blocks(error, "a rank failed", None):
            print("\n".join(line.text for line in block), file=sys.stderr)
        return NOT_JUDGED


def _look_at(known: argparse.Namespace) -> None:
    """Raises BadCase for options that do not go together."""
    whole = known.table or known.plot is not None
    if (known.mode is None) == (not whole):
        raise BadCase("sandbox", known.mode, "either single, multi, or --table and --plot DIR")
    for name in OF_ONE_RUN:
        if known.mode is None and getattr(known, name) is not None:
            right = "only with single or multi: the table's and the plots' are as published"
            raise BadCase(name, getattr(known, name), right)
    if known.ranks is not None and known.mode == "single":
        raise BadCase("ranks", known.ranks, "only with multi: single is one process")
    if known.as_published and known.mode != "multi":
        raise BadCase("as_published", True, "only with multi: it is a mistake of several ranks")
    if known.json is not None and not known.table:
        raise BadCase("json", str(known.json), "only with --table")
    look_at_file("json", known.json)
    look_at_folder("plot", known.plot)
    if not 0 <= known.seed < 2**62:
        raise BadCase("seed", known.seed, "an integer from 0, below 2**62")
    if known.plot is not None:
        from ddp_equivalence.commands.sandbox.plot import look_for_matplotlib

        look_for_matplotlib()


def _setup(known: argparse.Namespace) -> Setup:
    from ddp_equivalence.commands.sandbox.problem import Setup

    given = {name: getattr(known, name) for name in OF_ONE_RUN if getattr(known, name) is not None}
    deterministic = TRUTHS.get(str(given.pop("deterministic", "False")).lower())
    if deterministic is None:
        raise BadCase("deterministic", known.deterministic, "True or False")
    defaults: dict[str, Any] = {
        "lr": 1e-3,
        "batch_size": 16,
        "n_experiments": 1 if deterministic else 10_000,
        "ranks": 8 if known.mode == "multi" else 1,
    }
    setup = Setup(**(defaults | given), deterministic=deterministic, seed=known.seed)
    if known.mode == "multi" and setup.ranks == 1:
        raise BadCase("ranks", 1, "2 or more for multi; one process is single")
    return setup


def _one(setup: Setup, as_published: bool) -> int:
    from ddp_equivalence.commands.sandbox import agreement, text
    from ddp_equivalence.commands.sandbox.closed_form import closed_form
    from ddp_equivalence.commands.sandbox.training import train

    print(text.title(setup, as_published), flush=True)
    outcome, expected = train(setup, as_published, _progress("")), closed_form(setup)
    agreements = agreement.with_closed_form(outcome, expected)
    for line in ("", *text.lines(setup, outcome, expected, agreements)):
        print(line)
    if setup.ranks > 1:
        for line in text.spread_lines(setup, outcome):
            print(line)
    named = _named(setup) if as_published else True
    holds = [one.holds for one in agreements]
    if False in holds or outcome.spread or not named or as_published:
        return DIFFERENT
    return NOT_JUDGED if None in holds else SAME


def _named(setup: Setup) -> bool:
    """Print how the suite names the published script's mistake; True if it does."""
    from ddp_equivalence.check_equivalence import check
    from ddp_equivalence.commands.sandbox import text
    from ddp_equivalence.commands.sandbox.as_published import as_published, case_of

    verdict = check(case_of(setup), as_published, backend="gloo")
    print("\nThe suite on the first step of this, with noise:\n")
    print("\n".join(str(verdict).splitlines()[: text.REPORT_LINES]))
    return verdict.cause == "raw_module_called"


def _table(seed: int, path: Path | None) -> int:
    from ddp_equivalence.commands.sandbox import table
    from ddp_equivalence.commands.sandbox.published import ROWS

    done: list[Done] = []
    interrupted = False
    try:
        print("\n".join(table.head()), flush=True)
        for number, row in enumerate(ROWS, start=1):
            one = table.run_row(row.seeded(seed), _progress(f"row {number} of {len(ROWS)}, "))
            done.append(one)
            print("\n".join(table.lines(one)), flush=True)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted: {len(done)} of {len(ROWS)} rows done")
    except RankFailed:
        print(f"\n{len(done)} of {len(ROWS)} rows done", flush=True)
        raise
    finally:
        write_json("json", path, table.as_json(done, seed, interrupted))
    if interrupted:
        return INTERRUPTED
    print("\n".join(table.foot(done)))
    return DIFFERENT if any(one.wrong for one in done) else SAME


def _progress(before: str) -> Any:
    """One line on a terminal, overwritten; elsewhere nothing."""

    def tell(done: int, of: int) -> None:
        if sys.stderr.isatty():
            end = "\r" + " " * 60 + "\r" if done == of else ""
            print(f"\r{before}{done} of {of} blocks{end}", end="", file=sys.stderr, flush=True)

    return tell
