"""``ddp-equivalence check FILE.py``: your own case and step."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import EXIT_CODE_OF_OUTCOME
from ddp_equivalence.commands.output import kept_output, report_of_kept, require_writable_folder
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.report.text import painted, width_of

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.user_file import UserCheck
    from ddp_equivalence.report.verdict import Verdict

EXPORT_OPTIONS = (
    *("compare", "lr", "steps", "backend"),
    *("optimizer", "clip", "reference", "seeds"),
)
"""Arguments of check() that the exported script takes too."""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "check",
        help="check your own case and step",
        description="Compare what your own training step leaves on every rank with one big batch. "
        "Exit code 0: same, 1: different, 2: bad input, 3: could not be judged.",
    )
    parser.add_argument(
        "target",
        metavar="FILE.py[:NAME]",
        help="a file with `case = Case(...)` and `def step(model, shard, rank)`; NAME takes "
        "another step in it, a tuple (case, step) or (case, step, options), or a strategy such as "
        "ddp_mean",
    )
    of_case = parser.add_argument_group("in place of what the case has")
    for name, kind, text in OF_CASE:
        of_case.add_argument(f"--{name}", type=kind, help=text)
    of_case.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16", "as-built"),
        help="as-built keeps the dtype of the model",
    )
    of_check = parser.add_argument_group("how it is checked")
    for name, kind, metavar, text in OF_CHECK:
        of_check.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    for name, text in SWITCHES_OF_CHECK.items():
        of_check.add_argument(f"--{name}", action="store_true", default=None, help=text)
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
    parser.add_argument(
        "--full",
        action="store_true",
        help="print all that is known of a difference, also the causes that were ruled out",
    )
    parser.add_argument(
        "--github",
        action="store_true",
        help="if the step is not the same, print an annotation for GitHub Actions as well",
    )


OF_CASE: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("layout", str, "such as 2x2"),
    ("shards", str, "such as 5+3"),
    ("seed", int, "a whole number"),
    (
        "examples",
        str,
        "only the first N examples of the batch, or those at positions such as 0,1,5",
    ),
)
"""Options that replace something of the case: name, type and help."""

OF_CHECK: tuple[tuple[str, Callable[[str], Any], str | None, str], ...] = (
    (
        *("backend", str, None),
        "auto, gloo, gloo_cuda, nccl, nccl_shared (ranks share GPUs), nccl2 or nccl-legacy; auto "
        "takes NCCL if there is a GPU, shared if there are too few, and gloo on the CPU else",
    ),
    (
        *("compare", str, None),
        "gradients (the default), or update, which is how far the weights have moved",
    ),
    ("steps", int, "N", "read the batch as N consecutive big batches"),
    ("lr", float, None, "with --compare update: the learning rate of the reference's SGD"),
    ("deadline", float, "SECONDS", "the time that the ranks get for the case"),
    (
        *("collective-deadline", float, "SECONDS"),
        "the time that one collective gets; default half of the deadline",
    ),
)
"""Options that become the argument of check() that has the same name: with type, metavar, help."""

SWITCHES_OF_CHECK = {
    "in-process": "run rank 0 in this process, without a deadline, so that breakpoint() works in "
    "the step",
    "allow-changes": "do not fail if the step changes its process (seed, environment, default "
    "dtype, threads ...)",
}


def run(arguments: argparse.Namespace) -> int:
    """Judge the case, or many variations of it with --explore, and print the report."""
    path, name = _target(arguments.target)
    require_writable_folder("export_repro", arguments.export_repro)
    _check_exploration(arguments)
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

    user_check = load(path, name)
    changes = _given(arguments, ["layout", "shards", "seed"])
    if arguments.dtype is not None:
        as_built = arguments.dtype == "as-built"
        changes["dtype"] = None if as_built else getattr(torch, arguments.dtype)
    names = [
        option.replace("-", "_") for option in [*(row[0] for row in OF_CHECK), *SWITCHES_OF_CHECK]
    ]
    given_options = _given(arguments, names)
    options = user_check.options | given_options
    _require_known_options(options)
    examples = None if arguments.examples is None else build.parse(arguments.examples)
    if arguments.explore is not None:
        fixed = changes if examples is None else changes | {"examples": examples}
        return EXIT_CODE_OF_OUTCOME[
            _explore(arguments, replace(user_check, options=options), fixed)
        ]
    case = replace(user_check.case, **changes)
    case = case if examples is None else build.with_examples(case, examples)
    stdout = sys.stdout
    with kept_output(unless=bool(options.get("in_process"))) as printed:
        verdict = check(case, user_check.step, **options)
        report = _report(verdict, stdout)
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
    for line in search.report():
        exploration.show(line)
    outcomes = {judged.outcome for judged in search.judged.values()}
    if "different" in outcomes:
        return "different"
    return "same" if outcomes <= {"same", "refused"} and not search.stopped else "unknown"


def _check_exploration(arguments: argparse.Namespace) -> None:
    """Raises BadCase for a number of variations, or options, with which none can be explored."""
    count = arguments.explore
    if count is None:
        return
    if count < 1:
        raise BadCase("explore", count, "a number of cases from 1")
    if arguments.in_process:
        raise BadCase("explore", count, "left out with --in-process, which has no deadline")
    if arguments.export_repro is not None:
        right = "left out with --explore: export the case that it prints at its end"
        raise BadCase("export_repro", str(arguments.export_repro), right)


def _target(text: str) -> tuple[Path, str]:
    """File and name of ``FILE.py`` or ``FILE.py:NAME``.

    Raises BadCase if there is no such file, before anything slow is imported.
    """
    file, _, name = text.rpartition(":") if ".py:" in text else (text, "", "step")
    file = file.removesuffix(":")  # pytest writes FILE.py::NAME
    if not Path(file).is_file():
        raise BadCase("FILE", file, "a Python file that exists")
    return Path(file), name


def _given(arguments: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The values of those named options that the command line has."""
    given = vars(arguments)
    return {name: given[name] for name in names if given[name] is not None}


def _require_known_options(options: dict[str, Any]) -> None:
    """Raises BadCase if check() does not take the options."""
    from ddp_equivalence.measurement.request import CheckOptions

    known = CheckOptions.__annotations__
    if unknown := options.keys() - known.keys():
        first = min(unknown, key=str)
        right = f"options of check(): {', '.join(known)}; {first!r} is none of them"
        raise BadCase("options", options, right)


def _report(verdict: Verdict, stdout: TextIO) -> str:
    from ddp_equivalence.report.render import report_lines

    with settings.using(settings.replaced(width=width_of(stdout, settings.current().width))):
        return painted(report_lines(verdict), stdout)


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
    except (BadCase, OSError) as error:
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
