"""``ddp-equivalence check FILE.py --explore N``: variations of a user's own case."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ddp_equivalence.case import example_subset
from ddp_equivalence.commands.explore import step_search, step_text
from ddp_equivalence.commands.explore.variations import Variation
from ddp_equivalence.commands.user_file import UserCheck


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
        words += ["--examples", example_subset.as_text(variation.examples)]
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
