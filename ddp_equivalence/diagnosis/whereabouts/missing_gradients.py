"""Where gradients are missing on some ranks: which modules these never called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.rank_lines import lines_only_on
from ddp_equivalence.diagnosis.whereabouts.station_text import at
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    Whereabouts,
    distinct,
    named,
    ranked,
)
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.observation import Observation


def where_gradients_are_missing(
    observed: Mapping[int, Observation], names: Sequence[str]
) -> Whereabouts | None:
    """None if they are not. ``names``: the parameters that have a gradient in the big batch."""
    missing = {rank: _missing(seen, names) for rank, seen in observed.items()}
    ranks = tuple(rank for rank, of_rank in missing.items() if of_rank)
    if not ranks:
        return None  # what the step returned lacks them, or they have another shape
    gone = missing[ranks[0]]
    who = ranked(ranks, len(observed))
    seen = observed[ranks[0]]
    backwards = [call for call in seen.calls if call.kind is Kind.BACKWARD]
    called = {call.name for call in seen.trace.module_calls}
    module = gone[0].rpartition(".")[0]
    if not backwards:
        text = f"No backward pass ran on {who}."
    elif called and module not in called:
        text = f"The module {module or 'itself'} is not called on rank {ranks[0]}."
    else:
        text = f"Backward passes ran on rank {ranks[0]}, and none left these gradients."
    last = [line_of(call) for call in seen.calls][-1:]
    return Whereabouts(
        "own gradient",
        f"{len(gone)} gradients are missing"
        if len(gone) > 1
        else "the gradient of a parameter is missing",
        f"{who[:1].upper()}{who[1:]} left no gradient of {named(gone)}. {text}",
        distinct(
            [
                *lines_only_on(observed, ranks),
                *(at(line_of(call), "backward began here") for call in backwards[-1:]),
                *(at(line, f"the last recorded call of rank {ranks[0]}") for line in last),
            ]
        ),
        tuple(gone),
        ranks,
    )


def _missing(seen: Observation, names: Sequence[str]) -> list[str]:
    """The parameters that had no gradient when the second run ended, in their order."""
    last: dict[str, bytes] = {}
    for state in seen.trace.states:
        last |= state.values
    if not seen.trace.complete:
        return []
    return [name for name in names if not last.get(name, b"")]
