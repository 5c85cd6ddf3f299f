"""Finds the step in which optimizers that have the same gradients make different updates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.differences_between_ranks import lines_at
from ddp_equivalence.observed_scripts.places import Place
from ddp_equivalence.observed_scripts.recorded_step import RecordedStep

MOST_CHARACTERS = 24
"""A longer text stands for a tensor and not for a number."""

PARTED = "optimizers_differ_between_ranks"


def parted_at(step: ObservedStep) -> tuple[int, list[str]]:
    """The step before this one in which trained weights came to differ between ranks, though they
    and their gradients had been the same, and their names; -1 and no names if there is none.
    """
    record, ranks = step.record, range(step.record.world_size)
    now = [record.step(rank, step.number).weights for rank in ranks]
    apart = [name for name in now[0] if len({one.get(name) for one in now}) > 1]
    for number in reversed(range(step.number)) if apart else ():
        before = [record.step(rank, number).weights for rank in ranks]
        readers = [record.reader(rank, number) for rank in ranks]
        held = {n: [one.tensor(f"held/{n}") for one in readers] for n in apart}
        stepped = {n: of for n, of in held.items() if all(one is not None for one in of)}
        if stepped:
            names = [
                name
                for name, (first, *others) in stepped.items()
                if len({one.get(name) for one in before}) == 1
                and all(torch.equal(first, other) for other in others)
            ]
            return (number, names) if names else (-1, [])
    return -1, []


def weights_part(step: ObservedStep) -> Iterator[Finding]:
    """The finding, with the option or the state of the optimizers that differs between ranks."""
    number, names = parted_at(step)
    if not names:
        return
    before = [step.record.step(rank, number) for rank in range(step.record.world_size)]
    by_rank = [one.earlier.steps_with for one in before]
    keys = [
        key for key in dict.fromkeys(k for one in by_rank for k in one) if _differs(key, by_rank)
    ]
    keys = [key for key in keys if key.split(" of ")[-1] in names or " of group " in key]
    named = ", ".join(step.short(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
    seen, place, fix = "", before[0].stepped_at, "let all ranks change their weights alike."
    if keys:
        key, _, of = keys[0].partition(" of ")
        values = [one.get(keys[0], "none") for one in by_rank]
        shown = [f"{v} on rank {r}" for r, v in enumerate(values)]
        more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
        digests = all(len(value) > MOST_CHARACTERS for value in values if value != "none")
        is_state = not of.startswith("group ")
        seen = f"{key} of {step.short(of) if is_state else of} "
        seen += f"differs{more}" if is_state and digests else f"is {', '.join(shown)}{more}"
        place = _line_of_state(before) if is_state else _line_of_option(before[0], key)
        fix = f"let {key} be the same on all ranks: decide it from values that are reduced over "
        fix += "them, or load and change the optimizer's state on all of them alike."
    what = f"the optimizers of the ranks make different updates{f': {seen}' if seen else ''}"
    yield Finding(
        cause=PARTED,
        sentence="ranks with the same weights and gradients make different updates",
        look_at="learning rates, options and state of the optimizer, which must not depend on rank",
        unexplained=None,
        accepted=True,
        headline=f"weights are equal until step {number + 1}, in which {what}",
        because=f"{named} has the same gradient on all ranks in step {number + 1}, and differs "
        "between ranks afterwards",
        fix=fix,
        lines=lines_at(place, seen or "the weights differ after this step"),
    )


def _differs(key: str, by_rank: Sequence[Mapping[str, str]]) -> bool:
    return len({one.get(key) for one in by_rank}) > 1


def _line_of_state(before: Sequence[RecordedStep]) -> Place:
    """The line that loaded the state on some rank, else the one that steps."""
    loaded = [one.earlier.state_loaded for one in before if one.earlier.state_loaded.file]
    return loaded[0] if loaded else before[0].stepped_at


def _line_of_option(before: RecordedStep, key: str) -> Place:
    """The last line that stepped a scheduler, else the only one that assigns the option, else the
    one that made the optimizer.
    """
    if before.earlier.scheduled.file and key != "weight_decay":
        return before.earlier.scheduled
    file = before.stepped_at.file
    assigned = re.compile(rf"""\[["']{re.escape(key)}["']\]\s*[-+*/]?=[^=]""")
    lines = Path(file).read_text(errors="replace").splitlines() if file else []
    found = [number for number, line in enumerate(lines, start=1) if assigned.search(line)]
    return Place(file, found[0]) if len(found) == 1 else before.earlier.optimizer
