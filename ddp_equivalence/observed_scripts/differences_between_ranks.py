"""What a record shows the ranks to do differently that all of them must do alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.as_case import OWN, ObservedStep, distance, rounding_of
from ddp_equivalence.observed_scripts.oracle import CannotReplay
from ddp_equivalence.observed_scripts.recorded_step import Place

ONLY_ON_SOME = "parameter_frozen_on_one_rank"

OF_BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers in which the ranks differ by design: training does not read them."""


def differences_between_ranks(step: ObservedStep) -> Iterator[Finding]:
    """The causes that were seen happening in this step."""
    yield from _frozen_on_some_ranks(step)
    yield from _left_out_on_some_ranks(step)


def _frozen_on_some_ranks(step: ObservedStep) -> Iterator[Finding]:
    ranks = range(step.record.world_size)
    frozen = [set(step.record.step(rank, step.number).frozen) for rank in ranks]
    held = [step.record.reader(rank, step.number).gradient_names("held/") for rank in ranks]
    names = set[str]().union(*frozen) - frozen[0].intersection(*frozen)
    names &= set[str]().union(*held)  # a parameter without a gradient is trained nowhere
    if not names:
        return
    late = [rank for rank in ranks if frozen[rank] & names]
    where = ranks_text(late)
    place = step.record.step(late[0], step.number).frozen[min(frozen[late[0]] & names)]
    named = _named(step, names)
    yield Finding(
        cause=ONLY_ON_SOME,
        sentence="a parameter of the optimizer is frozen on some ranks, and trained on others",
        look_at="requires_grad, which must be the same on all ranks before DDP wraps the model",
        accepted=True,
        headline=f"{named} is frozen on {where} only",
        because=f"requires_grad of {named} is False on {where} when the optimizer steps",
        fix="set requires_grad alike on all ranks, before the model is wrapped.",
        lines=lines_at(place, f"freezes {named} on {where} only"),
    )


def _left_out_on_some_ranks(step: ObservedStep) -> Iterator[Finding]:
    """The optimizers of some ranks do not have a parameter that those of others have."""
    by_rank = _stepped_with(step, step.number)
    names = set[str]().union(*by_rank) - by_rank[0].intersection(*by_rank)
    if not names or not by_rank[0].intersection(*by_rank):
        return
    late = [rank for rank, of_rank in enumerate(by_rank) if names - of_rank]
    if any(step.record.step(rank, step.number).unnamed for rank in late):
        return  # they may be there, in modules that these ranks have not called yet
    where, named = ranks_text(late), _named(step, names)
    place = step.record.step(late[0], step.number).earlier.optimizer
    yield Finding(
        cause=ONLY_ON_SOME,
        sentence="a parameter is in the optimizer of some ranks, and in that of others it is not",
        look_at="what the optimizer is given: the same parameters on all ranks",
        accepted=True,
        headline=f"the optimizer of {where} does not have {named}",
        because=f"{named} is in the optimizer of other ranks",
        fix="give the optimizer the same parameters on all ranks.",
        lines=lines_at(place, f"makes the optimizer, on {where} without {named}"),
    )


def _stepped_with(step: ObservedStep, number: int) -> list[set[str]]:
    """For each rank, the parameters with which its optimizers stepped in a step."""
    readers = [step.record.reader(rank, number) for rank in range(step.record.world_size)]
    return [{*one.gradient_names("held/"), *one.step.without_gradient} for one in readers]


def other_optimizers_step(step: ObservedStep) -> Iterator[Finding]:
    """No parameter is stepped with on all ranks, which in the first step had the same ones."""
    first, now = _stepped_with(step, step.record.steps[0]), _stepped_with(step, step.number)
    if any(names != first[0] for names in first) or now[0].intersection(*now):
        return
    places = [step.record.step(r, step.number).stepped_at for r in range(len(now))]
    notes = [f"rank {r} steps with {_full(names)}" for r, names in enumerate(now)]
    yield Finding(
        cause="optimizers_differ_between_ranks",
        sentence="an optimizer steps on some ranks, and on others it is left out",
        look_at="what decides whether an optimizer steps, which must be the same on all ranks",
        accepted=True,
        headline="ranks step with different optimizers: " + "; ".join(notes),
        fix="decide alike on all ranks, from values that are reduced over the ranks.",
        lines=tuple(one for pair in zip(places, notes, strict=True) for one in lines_at(*pair)),
    )


def tensors_differ_between_ranks(step: ObservedStep) -> Iterator[Finding]:
    """Ranks have other values in weights or buffers that are not trained, such as those of a
    teacher, and a rank that has others than rank 0 computes what one process, which has those of
    rank 0, does not compute from its rows.
    """
    recorded = [step.record.step(rank, step.number) for rank in range(step.record.world_size)]
    trained = set(step.record.reader(0, step.number).gradient_names("held/"))
    trained |= set(recorded[0].without_gradient)
    first, buffers = recorded[0].weights, recorded[0].earlier.buffers
    names = [
        name
        for name in first
        if name not in trained
        and not name.endswith(OF_BATCH_NORM)
        and all(name in one.weights for one in recorded)
        and any(one.weights[name] != first[name] for one in recorded)
    ]
    apart = [
        r for r, one in enumerate(recorded) if any(one.weights.get(n) != first[n] for n in names)
    ]
    if not names or _computes_what_its_rows_give(step, 0) is not True:
        return
    if not any(_computes_what_its_rows_give(step, rank) is False for rank in apart):
        return
    module = names[0].partition(":")[0]
    of_module = [name for name in names if name.startswith(f"{module}:")]
    are_buffers = all(name in buffers for name in of_module)
    kind, what = ("buffers", "tensors") if are_buffers else ("weights", "weights")
    named = of_module[0].partition(":")[2]
    headline = f"{named} of {module} differs between ranks"
    if len(of_module) > 1:
        headline = f"{len(of_module)} {what} of {module} differ between ranks, such as {named}"
    yield Finding(
        cause=f"{kind}_differ_between_ranks",
        sentence=f"{what} that are not trained have other values on other ranks, and what the "
        "ranks compute depends on them",
        look_at=f"where {module} gets its {what}: they must be the same on all ranks",
        accepted=True,
        headline=headline,
        because=f"{ranks_text(apart)} computed what one process, which has the {what} of rank 0, "
        "does not compute from the same rows",
        fix=f"give {module} the same {what} on all ranks; broadcast or reduce what changes them.",
        lines=lines_at(buffers[of_module[0]], f"gives {named} another value on each rank")
        if are_buffers
        else _loaded_on_some_ranks(step, module),
    )


def _loaded_on_some_ranks(step: ObservedStep, module: str) -> tuple[PointedLine, ...]:
    """The line that loads the weights of a module, if only some ranks run it."""
    ranks = range(step.record.world_size)
    loaded = [step.record.step(rank, step.number).earlier.loaded.get(module) for rank in ranks]
    on = [rank for rank in ranks if loaded[rank] is not None]
    place = loaded[on[0]] if on else None
    if place is None or len(on) == len(ranks):
        return ()
    return lines_at(place, f"loads the weights of {module} on {ranks_text(on)} only")


def _computes_what_its_rows_give(step: ObservedStep, rank: int) -> bool | None:
    """None if one process cannot compute it."""
    own = step.gradients(rank, OWN)
    try:
        alone = step.computed_alone(step.rows_by_rank[rank])
    except CannotReplay:
        return None
    return distance([(1.0, own), (-1.0, alone)]) <= rounding_of(own)


def _named(step: ObservedStep, names: set[str]) -> str:
    return _full({*map(step.short, names)})


def _full(names: set[str]) -> str:
    """One of them, with its module."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return min(names).replace(":", ".") + more


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text: ``rank 0``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def lines_at(place: Place, note: str, missing: str = "") -> tuple[PointedLine, ...]:
    """The line to mark; () if none is known. ``missing``: what should follow it."""
    if not place.file:
        return ()
    line = CodeLine(place.file, place.number, place.function)
    return (PointedLine(line, note, is_fault=True, missing=missing),)
