"""``ddp-equivalence sandbox``: the published toy problem, measured and in closed form."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.util import find_spec

from ddp_equivalence.case.errors import BadCase, Words
from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME

OF_A_SINGLE_RUN: dict[str, tuple[type, str]] = {
    "lr": (float, "the learning rate; default 1e-4"),
    "batch_size": (int, "the batch size of each rank; default 16"),
    "n_epochs": (int, "the number of epochs, each with noise of its own; default 1"),
    "deterministic": (str, "True, the default, adds no noise; False adds it"),
    "n_experiments": (
        int,
        "the number of independent experiments; default 1, and with noise 10000 (the published "
        "script: 1)",
    ),
    "ranks": (int, "the ranks of multi; default 8"),
}
"""The options of single and multi, with their type and help. The table does not take them."""

HELP = "run the published toy problem: one neuron on one process, or on many ranks"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Train one neuron y = w x, which starts at w = 1, on 256 samples with L1 loss "
        "and plain SGD. Inputs are 1 and targets 0; standard normal noise is added to both unless "
        "--deterministic True. The command prints what was measured, the closed form, and whether "
        "they agree within 99.9 % intervals. This needs the extra `sandbox`. Exit code 0: all "
        "agree, 1: some do not, 2: bad input, 3: a rank failed."
    )
    parser.add_argument(
        "mode", nargs="?", choices=("single", "multi"), help="one process, or many ranks"
    )
    for name, (kind, text) in OF_A_SINGLE_RUN.items():
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, type=kind, metavar=name.upper(), help=text)
    parser.add_argument(
        "--as_published",
        "--as-published",
        action="store_true",
        help="run multi with the mistake of the published script, which calls the bare net",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the seed of the noise, default 0; the table has 25 intervals of 99.9 %%, so about 2 "
        "seeds in 100 print DIFFER by chance",
    )
    parser.add_argument("--table", action="store_true", help="run all nine published rows")


def run(arguments: argparse.Namespace) -> int:
    """Run what the arguments ask for, and return the exit code.

    Raises BadCase, before anything runs, for arguments that cannot be right.
    """
    mode = arguments.mode
    given = {name: getattr(arguments, name) for name in OF_A_SINGLE_RUN}
    given = {name: value for name, value in given.items() if value is not None}
    if (mode is None) == (not arguments.table):
        raise BadCase("sandbox", mode, "single, or multi, or --table")
    for name, value in given.items() if mode is None else ():
        right = "given only with single or multi: the table uses the published values"
        raise BadCase(name, value, right)
    if "ranks" in given and (mode == "single" or arguments.ranks == 1):
        raise BadCase("ranks", arguments.ranks, "2 or more, and only with multi")
    if arguments.as_published and mode != "multi":
        raise BadCase("as_published", True, "given only with multi, which has several ranks")
    if find_spec("scipy") is None:  # it computes the intervals
        right = "run beside scipy: pip install 'ddp_equivalence[sandbox]'"
        raise BadCase("sandbox", Words("without scipy"), right)
    if mode is None:
        return _table(arguments.seed)
    return _single_run(mode, given, arguments.seed, arguments.as_published)


def _single_run(mode: str, given: dict[str, object], seed: int, published: bool) -> int:
    from ddp_equivalence.checking.check import check
    from ddp_equivalence.commands.sandbox import table, training

    noise = str(given.pop("deterministic", "True")).lower()
    if noise not in ("true", "false"):
        raise BadCase("deterministic", noise, "True or False")
    defaults = {"lr": 1e-4, "batch_size": 16, "n_experiments": 1 if noise == "true" else 10_000}
    ranks = 8 if mode == "multi" else 1
    fields = {"ranks": ranks, "seed": seed, "deterministic": noise == "true"} | defaults | given
    problem = training.Problem(**fields)  # type: ignore[arg-type]  # argparse has read them
    if training.closed_form(problem).deviation > training.LARGEST_DEVIATION:
        raise BadCase(
            "lr", problem.lr, "smaller: the closed form is for weights that scatter little"
        )
    done = table.run_problem(problem, as_published=published)
    print("\n".join([table.HEAD, *table.run_lines(done)]), flush=True)
    if ranks > 1 and noise == "true":
        print("That the ranks agree shows nothing: without noise they see the same examples.")
    if published:
        verdict = check(training.case_of(problem), training.as_published, backend="gloo")
        print(
            f"\nThe suite's report on the first step of this run, with noise:\n\n{verdict}", end=""
        )
    return DIFFERENT if done.wrong or published else SAME


def _table(seed: int) -> int:
    from ddp_equivalence.commands.sandbox import table

    runs: list[table.FinishedRun] = []
    print(table.HEAD, flush=True)
    for row in table.ROWS:
        runs.append(table.run_problem(replace(row.problem, seed=seed), row))
        print("\n".join(table.run_lines(runs[-1])), flush=True)
    print("Runs with the same effective batch and learning rate are given the same noise.")
    print(f"Intervals: {table.LEVEL:.1%}. multi: DistributedDataParallel on its ranks (gloo, CPU).")
    print(f"{sum(not run.wrong for run in runs)} of {len(table.ROWS)} published rows agree.")
    return DIFFERENT if any(run.wrong for run in runs) else SAME
