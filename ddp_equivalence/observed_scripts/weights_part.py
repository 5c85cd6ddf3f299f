"""Finds the step in which optimizers that have the same gradients make different updates."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.differences_between_ranks import lines_at
from ddp_equivalence.observed_scripts.places import Place
from ddp_equivalence.observed_scripts.recorded_step import RecordedStep

LENGTH_OF_DIGEST = 32


def weights_part(step: ObservedStep) -> Iterator[Finding]:
    """The finding, if trained weights differ between ranks that were equal before an earlier step,
    and so were their gradients. It names the option or the state of the optimizers that differed.
    """
    ranks = range(step.record.world_size)
    now = [step.record.step(rank, step.number).weights for rank in ranks]
    apart = [name for name in now[0] if len({one.get(name) for one in now}) > 1]
    for number in reversed(range(step.number)) if apart else ():
        readers = [step.record.reader(rank, number) for rank in ranks]
        if stepped := set(apart).intersection(readers[0].gradient_names("held/")):
            break
    else:
        return
    before = [reader.step for reader in readers]
    for name in stepped:
        first, *others = (reader.tensor(f"held/{name}") for reader in readers)
        alike = all(o is not None and first is not None and torch.equal(first, o) for o in others)
        if not alike or len({one.weights.get(name) for one in before}) > 1:
            return
    found, place = _what_differs(step, before, stepped)
    yield Finding(
        cause="optimizers_differ_between_ranks",
        sentence="ranks with the same weights and gradients make different updates",
        look_at="learning rates, options and state of the optimizer, which must not depend on rank",
        accepted=True,
        headline=f"weights are equal until step {number + 1}, in which the optimizers of the ranks "
        f"make different updates{found and f': {found}'}",
        fix="let all ranks make the same update: with the same options and state, decided from "
        "values that are reduced over the ranks, and loaded on every rank.",
        lines=lines_at(place, found or "weights differ after this step, and not before it"),
    )


def _what_differs(
    step: ObservedStep, before: Sequence[RecordedStep], stepped: Collection[str]
) -> tuple[str, Place]:
    """The first option or state of the optimizers that differs, in words, and the line of it."""
    by_rank = [one.earlier.steps_with for one in before]
    keys = [
        key
        for key in {**by_rank[0], **by_rank[-1]}
        if len({one.get(key) for one in by_rank}) > 1
        and (" of group " in key or key.partition(" of ")[2] in stepped)
    ]
    if not keys:
        return "", before[0].stepped_at
    option, _, of = keys[0].partition(" of ")
    values = [one.get(keys[0], "none") for one in by_rank]
    each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    is_tensor = LENGTH_OF_DIGEST in map(len, values)
    text = f"differs ({len(keys)} such differences)" if is_tensor else f"is {each}"
    if not of.startswith("group "):
        loaded = [place for one in before if (place := one.earlier.state_loaded).file]
        return f"{option} of {step.short(of)} {text}", (*loaded, before[0].stepped_at)[0]
    return f"{option} of {of} {text}", _line_of(option, before[0])


def _line_of(option: str, before: RecordedStep) -> Place:
    """The last line that stepped a scheduler, else the only one that assigns the option, else the
    one that made the optimizer.
    """
    if option == "lr" and before.earlier.scheduled.file:
        return before.earlier.scheduled
    file = before.stepped_at.file
    assigns = re.compile(rf"""\[["']{re.escape(option)}["']\]\s*[-+*/]?=[^=]""")
    lines = Path(file).read_text(errors="replace").splitlines() if file else []
    found = [number for number, line in enumerate(lines, start=1) if assigns.search(line)]
    return Place(file, found[0]) if len(found) == 1 else before.earlier.optimizer
