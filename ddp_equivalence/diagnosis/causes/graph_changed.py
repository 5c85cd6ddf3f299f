"""DDP reduced gradients in the first step, and not in a later one that uses other parameters."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.setting import PointedLine, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.observation import Observation

NAMES_SHOWN = 3


def predict(view: View) -> Sequence[Prediction]:
    """Every rank's own gradient of what differs, in a step that leaves a parameter out."""
    left_out = _left_out(view)
    if not left_out or not view.setting.every_rank_reports:
        return ()
    predictions = []
    for local in view.local_gradients:
        held = view.on_reporting_ranks(local)
        if view.measured.only_some_parameters_differ:
            differing = view.measured.differing
            held = view.parameters.combined(held, view.expected_by_rank, differing)
        predictions.append(Prediction(held, f"without {_shown(left_out)}"))
    return tuple(predictions)


def _left_out(view: View) -> tuple[str, ...]:
    """The parameters that got a gradient in the first step and none in this one.

    () unless DDP was to reduce gradients in this step.
    """
    if view.setting.step == 0 or not view.observed.covers_every_rank:
        return ()
    wrappers = view.observed.wrappers
    if not any(any(one.synchronised) for one in wrappers) or not _called_ddp(view):
        return ()
    if all(one.logged.get("find_unused_parameters") for one in wrappers):
        return ()  # DDP does not wait for what it has found unused
    found = dict.fromkeys(_without_gradient_in_the_big_batch(view))
    for seen in view.observed.by_rank.values():
        first, now = (_with_gradient(view, seen, step) for step in (0, view.setting.step))
        if now:
            found |= dict.fromkeys(name for name in view.parameters.names if name in first - now)
    return tuple(found)


def _called_ddp(view: View) -> bool:
    """True if every rank called a DDP in this step."""
    return all(
        any(
            call.kind is Kind.FORWARD and "DataParallel" in call.what
            for call in view.observed.calls.of(rank)
        )
        for rank in range(view.world_size)
    )


def _without_gradient_in_the_big_batch(view: View) -> list[str]:
    """The parameters in DDP's buckets that this step's big batch does not use.

    The steps before were right, so it did use them there: DDP would have waited for them.
    """
    frozen = {name for seen in view.observed.by_rank.values() for name in seen.frozen}
    return [
        name
        for wrapper in view.observed.wrappers
        for bucket in wrapper.buckets
        for name in bucket
        if name not in view.parameters.places and name not in frozen and name != "?"
    ]


def _with_gradient(view: View, seen: Observation, step: int) -> set[str]:
    """The parameters that the first backward of the step gave a gradient."""
    for backward in seen.backwards:
        if backward.step == step:
            gradient = backward.gradient
            if gradient is None or len(gradient) != len(view.expected):
                return set()
            places = view.parameters.places
            return {name for name, place in places.items() if bool(gradient[place].any())}
    return set()


def is_static(view: View) -> bool:
    """True if a DDP was told that its graph never changes."""
    return any(bool(wrapper.logged.get("static_graph")) for wrapper in view.observed.wrappers)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def indication(view: View) -> Indication | None:
    """Compares the parameters that get a gradient in the first step and in this one."""
    left_out = _left_out(view)
    if not left_out:
        return None
    static = "; static_graph was set" if is_static(view) else ""
    return Indication(
        True,
        f"{_shown(left_out)} had a gradient in step 1 and none in step {view.setting.step + 1}, so "
        f"that DDP waited for the rest of a bucket{static}",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where DDP was made, and the backward in which it reduced nothing."""
    of_all_steps = StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})
    note = (
        "made with static_graph=True"
        if is_static(view)
        else "made with find_unused_parameters=False"
    )
    wrapped = [place.pointed(note, is_fault=True) for place in of_all_steps.places(Kind.WRAP)[-1:]]
    note = f"in step {view.setting.step + 1} it reduces nothing of {_shown(_left_out(view))}"
    return [*wrapped, *(one.pointed(note) for one in view.observed.calls.backwards[:1])]


def fix(view: View) -> str:
    """Let DDP look for what is unused."""
    instead = ", no static_graph" if is_static(view) else ""
    return f"make DDP with find_unused_parameters=True{instead}, or use every parameter."


HYPOTHESIS = Hypothesis(
    name="graph_changed",
    sentence="DDP reduced gradients in the first step, and not in a later step that leaves out a "
    "parameter: DDP waits for its gradient, and reduces nothing of its bucket.",
    look_at="static_graph=True, or find_unused_parameters left at False, with a head or branch "
    "that is not used in every step",
    predict=predict,
    indication=indication,
    tell_apart="Take a single step, or the same parameters in all steps.",
    headline="a later step leaves a parameter out",
    lines=lines,
    fix=fix,
)
