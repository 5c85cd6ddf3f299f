"""``ddp-equivalence check FILE.py``: your own case and step."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import EXIT_CODE_OF_OUTCOME
from ddp_equivalence.commands.output import kept_output, report_of_kept
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.report.text import painted, require_writable_folder

if TYPE_CHECKING:
    from ddp_equivalence.commands.user_file import UserCheck
    from ddp_equivalence.report.verdict import Verdict

EXPORT_OPTIONS = (
    *("compare", "lr", "steps", "backend"),
    *("optimizer", "clip", "reference", "seeds"),
)
"""Arguments of check() that the exported script takes too."""

HELP = "check your own case and step"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Compare what your own training step leaves on every rank with one big batch. "
        "Exit code 0: same, 1: different, 2: bad input, 3: could not be judged."
    )
    parser.add_argument(
        "target",
        metavar="FILE.py[:NAME]",
        help="a file with `case = Case(...)` and `def step(model, shard, rank)`; NAME takes "
        "another step in it, a tuple (case, step) or (case, step, options), or a strategy such as "
        "ddp_mean",
    )
    _add_options_of_the_check(parser)
    parser.add_argument(
        "--trial-seconds",
        type=float,
        metavar="SECONDS",
        help="the time for trying small edits of a step that differs without a known cause, and "
        "so finding the line to change; 0: none are tried; default "
        f"{settings.Settings.trial_seconds:g}",
    )
    parser.add_argument(
        "--explore",
        type=int,
        metavar="N",
        help="try N variations of the case, in everything that no other option fixes; if some are "
        "not the same, show the smallest such case",
    )
    parser.add_argument(
        "--export-repro",
        type=Path,
        metavar="DIR",
        help="if the step differs, write one plain torch script to DIR that shows the difference, "
        "for a bug report",
    )
    for name, text in (
        ("--full", "print all that is known of a difference, also the causes that were ruled out"),
        ("--github", "if the step is not the same, print an annotation for GitHub Actions as well"),
    ):
        parser.add_argument(name, action="store_true", help=text)


def _add_options_of_the_check(parser: argparse.ArgumentParser) -> None:
    """Add the options that replace fields of the case, and arguments of check()."""
    of_case = parser.add_argument_group("in place of what the case has").add_argument
    of_case("--layout", help="such as 2x2")
    of_case("--shards", help="such as 5+3")
    of_case("--seed", type=int, help="a whole number")
    of_case(
        "--examples",
        help="only the first N examples of the batch, or those at positions such as 0,1,5",
    )
    of_case(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16", "as-built"),
        help="as-built keeps the dtype of the model",
    )
    of_check = parser.add_argument_group("how it is checked").add_argument
    of_check(
        "--backend",
        help="auto, gloo, gloo_cuda, nccl, nccl_shared (ranks share GPUs), nccl2 or nccl-legacy; "
        "auto takes NCCL if there is a GPU, shared if there are too few, and gloo on the CPU else",
    )
    of_check(
        "--compare",
        help="gradients (the default), or update, which is how far the weights have moved",
    )
    of_check("--steps", type=int, metavar="N", help="read the batch as N consecutive big batches")
    of_check(
        "--lr",
        type=float,
        help="with --compare update: the learning rate of the reference's SGD",
    )
    for name, text in (
        ("--deadline", "the time that the ranks get for the case"),
        (
            "--collective-deadline",
            "the time that one collective gets; default half of the deadline",
        ),
    ):
        of_check(name, type=float, metavar="SECONDS", help=text)
    for name, text in (
        (
            "--in-process",
            "run rank 0 in this process, without a deadline, so that breakpoint() works in a step",
        ),
        (
            "--allow-changes",
            "do not fail if the step changes its process (seed, environment, default dtype, "
            "threads ...)",
        ),
    ):
        of_check(name, action="store_true", default=None, help=text)


def run(arguments: argparse.Namespace) -> int:
    """Judge the case, or many variations of it with --explore, and print the report."""
    path, name = target(arguments.target)
    require_writable_folder("export_repro", arguments.export_repro)
    count, in_process = arguments.explore, arguments.in_process
    if count is not None and (count < 1 or in_process):
        right = "left out with --in-process, which has no deadline"
        raise BadCase("explore", count, right if in_process else "a number of cases from 1")
    if count is not None and arguments.export_repro is not None:
        right = "left out with --explore: export the case that it prints at its end"
        raise BadCase("export_repro", str(arguments.export_repro), right)
    trial_seconds = arguments.trial_seconds
    if trial_seconds is None:
        trial_seconds = settings.current().trial_seconds
    if not 0 <= trial_seconds < float("inf"):
        raise BadCase("trial_seconds", trial_seconds, settings.RIGHT_TRIAL_SECONDS)
    start_early()  # the ranks' server imports torch while this process does
    reports = settings.replaced(
        full_report=arguments.full,
        full_report_with="--full",
        trial_seconds=trial_seconds,
        repeat=repeating_command(arguments),
    )
    with settings.using(reports):
        return _run(arguments, path, name)


def _run(arguments: argparse.Namespace, path: Path, name: str) -> int:
    import torch

    from ddp_equivalence.case import build
    from ddp_equivalence.checking.check import check
    from ddp_equivalence.commands.user_file import load
    from ddp_equivalence.measurement.request import CheckOptions
    from ddp_equivalence.report.render import report_lines

    user_check = load(path, name)
    changes = _given(arguments, ("layout", "shards", "seed"))
    if arguments.dtype is not None:
        as_built = arguments.dtype == "as-built"
        changes["dtype"] = None if as_built else getattr(torch, arguments.dtype)
    known = CheckOptions.__annotations__
    options = user_check.options | _given(arguments, known)
    if unknown := options.keys() - known.keys():
        first = min(unknown, key=str)
        right = f"without {first!r}: the options of check() are {', '.join(known)}"
        raise BadCase("options", options, right)
    examples = None if arguments.examples is None else build.parse(arguments.examples)
    if arguments.explore is not None:
        fixed = changes if examples is None else changes | {"examples": examples}
        varied = replace(user_check, options=options)
        return EXIT_CODE_OF_OUTCOME[_explore(arguments, varied, fixed)]
    case = replace(user_check.case, **changes)
    case = case if examples is None else build.with_examples(case, examples)
    stdout = sys.stdout
    with kept_output(unless=bool(options.get("in_process"))) as printed:
        verdict = check(case, user_check.step, **options)
        report = painted(report_lines(verdict), stdout)
    print(report + report_of_kept(printed.getvalue(), arguments.full), end="")
    if arguments.github and verdict.outcome != "same":
        print(_annotation(verdict))
    if arguments.export_repro is not None:
        print(_reproduction(verdict, user_check.step, options, arguments.export_repro))
    return EXIT_CODE_OF_OUTCOME[verdict.outcome]


def _explore(arguments: argparse.Namespace, varied: UserCheck, given: dict[str, Any]) -> str:
    """Vary the case and print the results. Returns "same", "different" or "unknown"."""
    from ddp_equivalence.commands import exploration

    def repeat(variation: exploration.Variation) -> str:
        changes = vars(variation) | {
            "examples": arguments.examples or variation.examples,
            "dtype": str(variation.dtype or "as-built").removeprefix("torch."),
        }
        if variation.dtype == varied.case.dtype:
            changes["dtype"] = arguments.dtype
        if variation.steps == varied.options.get("steps", 1):
            changes["steps"] = arguments.steps
        return repeating_command(argparse.Namespace(**vars(arguments) | changes))

    search = exploration.search_variations(varied, given, arguments.explore, repeat)
    print("\n".join(search.report()))
    outcomes = {judged.outcome for judged in search.judged.values()}
    if "different" in outcomes:
        return "different"
    return "same" if outcomes <= {"same", "refused"} and not search.stopped else "unknown"


def target(text: str) -> tuple[Path, str]:
    """File and name of ``FILE.py`` or ``FILE.py:NAME``.

    Raises BadCase if there is no such file, before anything slow is imported.
    """
    file, _, name = text.rpartition(":") if ".py:" in text else (text, "", "step")
    file = file.removesuffix(":")  # pytest writes FILE.py::NAME
    if not Path(file).is_file():
        raise BadCase("FILE", file, "a Python file that exists")
    return Path(file), name


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of those named options that the command line has."""
    given = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _annotation(verdict: Verdict) -> str:
    """The line for GitHub Actions. The message is the report, without the file's name on top."""
    from ddp_equivalence.report.render import headline_text, line_to_look_at
    from ddp_equivalence.report.text import annotation

    line = line_to_look_at(verdict)
    file, number = ("", 0) if line is None else (line.file, line.number)
    return annotation(file, number, headline_text(verdict), str(verdict))


def _reproduction(verdict: Verdict, step: Any, options: dict[str, Any], folder: Path) -> str:
    """Write the script if there is a difference to show.

    Returns the line to print: where the script is, or why there is none.
    """
    from ddp_equivalence.report.render import headline_text
    from ddp_equivalence.report.script import command_of, export

    if verdict.outcome != "different" and verdict.failure is None:
        return f"reproduction: none, there is nothing to reproduce ({verdict.outcome})"
    options = {name: value for name, value in options.items() if name in EXPORT_OPTIONS}
    headline = headline_text(verdict)
    try:
        path = export(verdict.case, step, folder, headline=headline, **options)
    except BadCase as error:
        return f"reproduction: none, {error}"
    return f"reproduction: {path} ({command_of(path)})"


NOT_REPEATED = frozenset(
    ("command", "target", "rest", "explore", "export_repro", "full", "github", "in_process")
)
"""Arguments that say what is done with the result, or how the check is debugged."""


def repeating_command(arguments: argparse.Namespace) -> str:
    """``ddp-equivalence check FILE.py:NAME`` with the options that decide what is compared."""
    words = ["ddp-equivalence", "check", arguments.target]
    for name, value in vars(arguments).items():
        if name in NOT_REPEATED or value is None or value is False:
            continue
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)
