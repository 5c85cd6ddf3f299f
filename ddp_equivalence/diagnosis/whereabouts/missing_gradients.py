"""Where gradients are missing on some ranks: which modules these never called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_equivalence.diagnosis.lines.origins import chosen, gone_through
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import reduces_gradients
from ddp_equivalence.diagnosis.whereabouts.cut_graph import cut_graph_of, leaf_line, off_lines
from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.module_state import lines_of_mode, mode_text, wrong_mode
from ddp_equivalence.diagnosis.whereabouts.rank_lines import lines_only_on
from ddp_equivalence.diagnosis.whereabouts.replayed_loss import Replay
from ddp_equivalence.diagnosis.whereabouts.station_text import at
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    Whereabouts,
    distinct,
    named,
    ranked,
)
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.trace import ModuleCall


def where_gradients_are_missing(
    observed: Mapping[int, Observation], names: Sequence[str], replay: Replay | None = None
) -> Whereabouts | None:
    """None if they are not. ``names``: the parameters that have a gradient in the big batch.

    ``replay``: what the loss of the case does; None if that is not known.
    """
    missing = {rank: _missing(seen, names) for rank, seen in observed.items()}
    ranks = tuple(rank for rank, of_rank in missing.items() if of_rank)
    if not ranks:
        return None  # what the step returned lacks them, or they have another shape
    gone = missing[ranks[0]]
    who = ranked(ranks, len(observed))
    seen = observed[ranks[0]]
    backwards = [call for call in seen.calls if call.kind is Kind.BACKWARD]
    calls = [call for call in seen.trace.module_calls if call.with_gradients]
    called = {call.name for call in calls}
    module = gone[0].rpartition(".")[0]
    headline, reasons = "", list[PointedLine | None]()
    if not backwards:
        text = f"No backward pass ran on {who}."
    elif backwards and (why := _why(seen, gone, calls, backwards[-1], replay)) is not None:
        headline, text, reasons = why
    elif called and module not in called:
        text = f"The module {module or 'itself'} is not called on rank {ranks[0]}."
    else:
        text = f"Backward passes ran on rank {ranks[0]}, and none left these gradients."
    last = [line_of(call) for call in seen.calls][-1:]
    return Whereabouts(
        "own gradient",
        (f"{headline}, and " if headline else "")
        + (f"{len(gone)} gradients are" if len(gone) > 1 else "the gradient of a parameter is")
        + " missing",
        f"{text} {who[:1].upper()}{who[1:]} left no gradient of {named(gone)}.",
        distinct(
            [
                *reasons,
                *lines_only_on(observed, ranks),
                *_gone_through(seen, backwards),
                *(at(line_of(call), "backward began here") for call in backwards[-1:]),
                *(at(line, f"the last recorded call of rank {ranks[0]}") for line in last),
            ]
        ),
        tuple(gone),
        ranks,
    )


def _gone_through(seen: Observation, backwards: Sequence[Call]) -> list[PointedLine | None]:
    """The line of the user's that chose what the loop around the last reduction goes through."""
    lines = tuple(line for call in backwards if (line := line_of(call)) is not None)
    run = RunLines(seen.trace.times_run or {}, seen.trace.lines_run or {}, lines)
    reductions = [one for one in seen.calls if reduces_gradients(one) and not one.in_backward]
    for call in reductions[-1:]:
        line = line_of(call)
        if line is not None:
            link = chosen(gone_through(run, (line, *call.callers)))
            note = f"chooses what the loop of line {line.number} goes through"
            return [at(link.line, note)] if link is not None and link.line != line else []
    return []


Why = tuple[str, str, list[PointedLine | None]]
"""A headline, a sentence and the lines."""


def _why(
    seen: Observation,
    gone: Sequence[str],
    calls: Sequence[ModuleCall],
    backward: Call,
    replay: Replay | None,
) -> Why | None:
    """What was recorded that keeps gradients from these parameters; None if nothing was."""
    frozen = _frozen(seen, gone)
    if frozen:
        what = f"sets requires_grad of {named(list(frozen))} to False"
        places = dict.fromkeys(line_of(call) for call in frozen.values())
        pointed = [
            at(place, what if len(places) == 1 else "freezes some", True) for place in places
        ]
        return "parameters are frozen", f"A line {what}.", pointed
    module = gone[0].rpartition(".")[0]
    mode = None if replay is None else wrong_mode(calls, replay.with_gradients)
    if mode is not None:
        lines = lines_of_mode(seen, mode)
        called = at(mode.line, "it is called here", not lines)
        text = mode_text(mode)
        return "a module is in another mode", f"{text[:1].upper()}{text[1:]}.", [*lines, called]
    without = [
        call
        for call in seen.trace.module_calls
        if call.name == module and not call.with_gradients and call.backwards == backward.backwards
    ]
    if without and module not in {call.name for call in calls}:
        text = f"{module or 'The model'} is called only where gradients are turned off."
        line = without[-1].line
        called = at(line, "called where gradients are turned off", True)
        off = off_lines(without[-1].off_at, line) if line is not None else []
        return "a module runs without gradients", text, [*off, called]
    cut = cut_graph_of(seen, backward.step, backward.backwards, replay)
    if cut is not None:
        return cut.headline, cut.sentence, list(cut.lines)
    leaf = leaf_line(seen, backward.step, backward.backwards)
    text = "A line makes a new leaf of a tensor that has a gradient."
    return None if leaf is None else ("a tensor was made a leaf", text, [leaf])


def _frozen(seen: Observation, gone: Sequence[str]) -> dict[str, Call]:
    """Those of the parameters that were frozen last -> the call that did it."""
    last: dict[str, Call] = {}
    for call in seen.calls:
        if call.kind is Kind.REQUIRES_GRAD:
            last |= dict.fromkeys(call.names, call)
    return {name: last[name] for name in gone if name in last and last[name].what.endswith("False")}


def _missing(seen: Observation, names: Sequence[str]) -> list[str]:
    """The parameters that had no gradient when the second run ended, in their order."""
    last: dict[str, bytes] = {}
    for state in seen.trace.states:
        last |= state.values
    if not seen.trace.complete:
        return []
    return [name for name in names if not last.get(name, b"")]
