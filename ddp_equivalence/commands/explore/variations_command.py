"""``ddp-equivalence check FILE.py --explore N``: try variations of a user's own case."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ddp_equivalence.case import example_subset
from ddp_equivalence.commands.explore import variations_report, variations_search
from ddp_equivalence.commands.explore.variations import Variation
from ddp_equivalence.commands.user_file import UserCheck


def explore_variations(
    user_check: UserCheck,
    given: Mapping[str, Any],
    count: int,
    target: str,
    options: Mapping[str, Any],
) -> str:
    """Vary a user's own case and print the results. Returns "same", "different" or "unknown".

    ``given``: fields of the case from the command line. ``target``: the file and step, as the
    command line has them. ``options``: its other options, for the line that repeats a case.
    """

    def repeat(variation: Variation) -> str:
        return " ".join(
            ["ddp-equivalence check", *_arguments(user_check, variation, target, options)]
        )

    _print(f"{count} variations of {user_check.case}")
    search = variations_search.search(user_check, given, count, repeat, progress=_print)
    for line in variations_report.report_lines(search):
        _print(line)
    outcomes = {result.outcome for result in search.results.values()}
    if "different" in outcomes:
        return "different"
    judged = outcomes <= {"same", "refused"} and not search.stopped
    return "same" if judged else "unknown"


def _arguments(
    user_check: UserCheck, variation: Variation, target: str, options: Mapping[str, Any]
) -> list[str]:
    words = [target, "--layout", variation.layout, "--shards", variation.shards]
    if variation.examples is not None:
        words += ["--examples", example_subset.as_text(variation.examples)]
    words += ["--seed", str(variation.seed)]
    if variation.dtype != user_check.case.dtype:
        words += ["--dtype", str(variation.dtype).removeprefix("torch.")]
    if variation.steps != user_check.options.get("steps", 1) or "steps" in options:
        words += ["--steps", str(variation.steps)]
    for option, value in options.items():
        if option != "steps":
            words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [shlex.quote(word) for word in words]


def _print(line: str) -> None:
    print(line, flush=True)
