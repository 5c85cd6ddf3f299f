"""The lines that gave a module of the model another mode, or another number, than it had."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.diagnosis.whereabouts.replay import calls_of
from ddp_equivalence.diagnosis.whereabouts.replayed_loss import replay_of
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.trace import ModuleCall

MOST_STATE_LINES = 2


def mode_text(call: ModuleCall) -> str:
    """In which mode a module was called, unlike for the big batch, as a clause."""
    modes = ("training", "evaluation") if call.training else ("evaluation", "training")
    whom = call.name or "the model"
    return f"{whom} is called in {modes[0]} mode, and in {modes[1]} mode for the big batch"


def lines_of_mode(seen: Observation, call: ModuleCall) -> list[PointedLine]:
    """The line that gave a called module the mode that it was called in; [] if none was seen."""
    what = f"training = {call.training}"
    mode = "training" if call.training else "evaluation"
    setting = [
        one
        for one in _states_before(seen, call.step, call.backwards)
        if one.what.startswith("training = ") and call.name in one.names
    ]
    if not setting or setting[-1].what != what:
        return []
    line = line_of(setting[-1])
    whole = "" in setting[-1].names
    whom = "the model" if whole else f"{call.name or 'the model'}"
    note = f"puts {whom} into {mode} mode, and its forward pass runs in it"
    return [PointedLine(line, note, is_fault=True)] if line is not None else []


def lines_of_state(seen: Observation, call: ModuleCall) -> list[PointedLine]:
    """The lines that set attributes of the called module, of one around it or of one inside it."""
    found: dict[object, PointedLine] = {}
    for one in _states_before(seen, call.step, call.backwards):
        about = [name for name in one.names if _are_related(name, call.name)]
        line = line_of(one)
        if about and line is not None:
            whom = about[0] or "the model"
            found[line] = PointedLine(line, f"sets {one.what} on {whom}")
    return list(found.values())[-MOST_STATE_LINES:]


def other_mode(pieces: Pieces, piece: Piece) -> ModuleCall | None:
    """The outermost call of a piece whose mode is not that of the same module in the replay."""
    replay = replay_of(pieces, piece)
    return None if replay is None else wrong_mode(calls_of(pieces, piece), replay.with_gradients)


def wrong_mode(calls: Sequence[ModuleCall], alone: Sequence[ModuleCall]) -> ModuleCall | None:
    """The outermost call whose mode is not that of the same module in the replay."""
    modes: dict[str, set[bool]] = {}
    for call in alone:
        modes.setdefault(call.name, set()).add(call.training)
    wrong = [call for call in calls if call.name in modes and call.training not in modes[call.name]]
    return min(wrong, key=lambda call: (call.name.count("."), call.name), default=None)


def _states_before(seen: Observation, step: int, backwards: int) -> list[Call]:
    return [
        one
        for one in seen.calls
        if one.kind is Kind.MODULE_STATE and (one.step, one.backwards) <= (step, backwards)
    ]


def _are_related(one: str, other: str) -> bool:
    """True if one module is the other, is inside it, or is around it."""
    inside = not other or one.startswith(f"{other}.")
    return not one or one == other or inside or other.startswith(f"{one}.")
