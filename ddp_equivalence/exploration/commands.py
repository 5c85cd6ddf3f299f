"""What the command line's exploring prints, and its exit codes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_equivalence import selection
from ddp_equivalence.exploration import step_search, step_text, suite_search, suite_text
from ddp_equivalence.exploration.variations import Variation
from ddp_equivalence.user_file import UserCheck


def explore_suite(right: int, wrong: int, seed: int, results: Path | None) -> bool:
    """Try random trials of the suite. True if it was right on all of them."""
    tally = suite_search.search(right, wrong, seed, tell=_print)
    _print("")
    for line in suite_text.lines(tally):
        _print(line)
    if results is not None:
        results.write_text(json.dumps(suite_text.record(tally), indent=1) + "\n")
    return not (tally.false_alarms or tally.misses)


def explore_step(
    found: UserCheck, given: Mapping[str, Any], count: int, target: str, rest: Mapping[str, Any]
) -> str:
    """Vary a user's own case and print what was found; "same", "different" or "unknown".

    ``given``: fields of the case from the command line; ``rest``: its other options, to repeat.
    """

    def repeat(variation: Variation) -> str:
        return " ".join(["ddp-equivalence check", *_arguments(found, variation, target, rest)])

    _print(f"{count} variations of {found.case}")
    searched = step_search.search(found, given, count, repeat, tell=_print)
    for line in step_text.lines(searched):
        _print(line)
    kinds = {one.kind for one in searched.tried.values()}
    if "different" in kinds:
        return "different"
    judged = kinds <= {"same", "refused"} and not searched.stopped
    return "same" if judged else "unknown"


def _arguments(
    found: UserCheck, variation: Variation, target: str, rest: Mapping[str, Any]
) -> list[str]:
    words = [target, "--layout", variation.layout, "--shards", variation.shards]
    if variation.examples is not None:
        words += ["--examples", selection.write(variation.examples)]
    words += ["--seed", str(variation.seed)]
    if variation.dtype != found.case.dtype:
        words += ["--dtype", str(variation.dtype).removeprefix("torch.")]
    if variation.steps != found.options.get("steps", 1) or "steps" in rest:
        words += ["--steps", str(variation.steps)]
    for option, value in rest.items():
        if option != "steps":
            words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [shlex.quote(word) for word in words]


def _print(line: str) -> None:
    print(line, flush=True)
