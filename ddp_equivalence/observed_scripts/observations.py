"""What the record shows of each rank, as the diagnosis reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan

from torch import Tensor

from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind
from ddp_equivalence.measurement.observation import Backward, Forward, Observation, RowsRead
from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.places import Place


def observations(
    step: ObservedStep, sample: ElementSample[str], held: Mapping[int, Mapping[str, Tensor | None]]
) -> dict[int, Observation]:
    """Rank -> what it was seen to do. ``held``: the gradients that are compared, of each rank."""
    return {rank: _of_rank(step, rank, sample, held[rank]) for rank in held}


def _of_rank(
    step: ObservedStep,
    rank: int,
    sample: ElementSample[str],
    held: Mapping[str, Tensor | None],
) -> Observation:
    reader = step.record.reader(rank, step.number)
    recorded = reader.step
    trained = {name: one for name, one in recorded.weights.items() if step.short(name) in held}
    weights = repr(sorted(trained.items()))
    forwards: list[Forward] = []
    backwards: list[Backward] = []
    calls: list[Call] = []
    passes = len(recorded.losses)
    for number in range(passes):
        forwards.append(_forward(step, rank, number, weights))
        first = next((call for call in recorded.calls if call.backwards == number), None)
        if first is not None:
            calls.append(_call(Kind.FORWARD, first.place, number, what=first.module))
        loss, place = recorded.losses[number], recorded.backward_at[number]
        own = reader.below(f"own_of_{number}/") or (reader.below("own/") if passes == 1 else {})
        backwards.append(
            Backward(
                loss=loss,
                forwards=len(forwards),
                issued=(None, None),
                step=0,
                gradient=_sampled(step, own, sample),
            )
        )
        calls.append(_call(Kind.BACKWARD, place, number, loss))
    for clip in recorded.clips:
        names = tuple(sample.sizes)
        norm = None if isnan(clip.norm) else clip.norm
        call = _call(Kind.CLIP, clip.place, passes, clip.limit, names=names)
        calls.append(replace(call, norm=norm, what="" if norm is None else "clip_grad_norm_"))
    stepped = recorded.optimizers[0]
    calls.append(_call(Kind.OPTIMIZER_STEP, recorded.stepped_at, passes, what=stepped))
    return Observation(
        forwards=tuple(forwards),
        backwards=tuple(backwards),
        wrappers=(),
        frozen=tuple(map(step.short, recorded.frozen)),
        buffers="",
        gradients={(0, name): digest({name: gradient}) for name, gradient in held.items()},
        clipped=tuple(clip.limit for clip in recorded.clips),
        calls=tuple(calls),
    )


def _forward(step: ObservedStep, rank: int, number: int, weights: str) -> Forward:
    """The forward pass before the backward pass with this number, of the step."""
    earlier = [one for one in step.group if one < step.number]
    micro_batch = number + sum(len(step.record.step(rank, one).losses) for one in earlier)
    rows = tuple(
        (place,)
        for place, row in enumerate(step.rows)
        if row.rank == rank and row.micro_batch == micro_batch
    )
    return Forward(RowsRead(rows) if rows else None, weights, generator=b"", seed=0, step=0)


def _sampled(
    step: ObservedStep, own: Mapping[str, Tensor], sample: ElementSample[str]
) -> Tensor | None:
    """The sampled elements of a rank's own gradients; None if some are not known."""
    of_names = {step.short(name): one for name, one in own.items()}
    if not set(sample.sizes) <= set(of_names):
        return None
    return sample.of({name: of_names[name] for name in sample.sizes})


def _call(
    kind: Kind,
    place: Place,
    backwards: int,
    value: float | None = None,
    what: str = "",
    names: tuple[str, ...] = (),
) -> Call:
    line = CodeLine(place.file, place.number, place.function) if place.file else None
    return Call(
        kind,
        line,
        line,
        step=0,
        backwards=backwards,
        value=value,
        what=what,
        names=names,
    )
