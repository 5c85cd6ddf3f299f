"""``ddp-equivalence check FILE.py``: your own case and step."""

from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import OF_OUTCOME
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.report.terminal import painted, width_of

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.report.verdict import Verdict

OPTIONS = (
    *("backend", "compare", "steps", "lr", "deadline", "collective_deadline"),
    *("in_process", "allow_changes"),
)
"""Of the command line that are arguments of check() under the same name."""

DTYPES = ("float64", "float32", "bfloat16", "float16", "as-built")


def add(commands: Commands) -> None:
    """Add the command's parser."""
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


def run(known: argparse.Namespace) -> int:
    """Judge one case, or with --explore many, and print the report."""
    path, name = _target(known.target)
    start_early()  # imports torch while this process does
    import torch

    from ddp_equivalence.case import example_subset
    from ddp_equivalence.check_equivalence import check
    from ddp_equivalence.commands.user_file import load

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
    examples = None if known.examples is None else example_subset.read(known.examples)
    if known.explore is not None:
        from ddp_equivalence.commands.explore.variations_command import explore_variations

        given = changes if examples is None else changes | {"examples": examples}
        found = replace(found, options=options)
        outcome = explore_variations(found, given, known.explore, known.target, rest)
        return OF_OUTCOME[outcome]
    case = replace(found.case, **changes)
    case = case if examples is None else example_subset.with_examples(case, examples)
    verdict = check(case, found.step, **options)
    with settings.using(settings.replaced(width=width_of(sys.stdout, settings.current().width))):
        print(painted(str(verdict), sys.stdout), end="")
    if known.export_repro is not None:
        print(_reproduction(verdict, found.step, options, known.export_repro))
    return OF_OUTCOME[verdict.outcome]


def _target(text: str) -> tuple[Path, str]:
    """File and name of ``FILE.py`` or ``FILE.py:NAME``; told before anything slow is imported.

    Raises BadCase if there is no such file.
    """
    file, _, name = text.rpartition(":") if ".py:" in text else (text, "", "step")
    if not Path(file).is_file():
        raise BadCase("FILE", file, "a Python file that is there")
    return Path(file), name


def _reproduction(verdict: Verdict, step: Any, options: dict[str, Any], folder: Path) -> str:
    """Write the script if there is something to show; say what was written, or why nothing."""
    from ddp_equivalence.report.script import command_of, export

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
