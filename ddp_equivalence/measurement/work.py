"""The work that every rank is given, and the evidence that it sends back beside its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from torch import Tensor, nn

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.random_state import Seeds
from ddp_equivalence.case.training import (
    ClipCall,
    Compare,
    GradientKey,
    Settings,
    Steps,
    Training,
)
from ddp_equivalence.comparison.gradients import Description, Digests, ElementSample
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.operation_log import Autocast
from ddp_equivalence.measurement.returned import Tf32
from ddp_equivalence.ranks.collectives import Collective, MissedWait
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.strategies import STRATEGIES

Step = (
    Callable[[nn.Module, Any, Rank], Mapping[str, Tensor | None] | None]
    | Callable[[nn.Module, Rank], Callable[[Any], Mapping[str, Tensor | None] | None]]
)
"""A user's own step: (model, shard, rank) -> None, or gradients (weights, for updates) by name. Or
a function or class (model, rank) that is called once, and returns a step (shard) -> the same, which
is called for every big batch."""


@dataclass(frozen=True)
class Work:
    """The case and the step as they travel to a rank: names, seeds and functions, no tensors.

    ``plant``: the name of the fault to plant in the step; "" for none. ``observe``: if it is given,
    the rank watches the step. It then sends no gradients, but these elements of them, inside its
    evidence. ``look_for_float32``: the rank only looks where the step computes in float32, and
    sends no gradients. ``log_operations``: the rank records the operations of torch that the step
    runs, and sends no gradients. ``order``: if it is given, the examples of the batch are put into
    this order first. ``log_draws``: a rank that is watched also records the random numbers that it
    draws. ``at_each_step``, ``after_clipping``: as in the request. ``read_order``: the order
    of the examples in the reference, in which what was read is looked up. ``truth``: the address of
    the true gradients. From so many parameters on, ``compared_from``, the rank compares its own
    with them, and sends none.
    """

    case: Case
    step: Step | str
    compare: Compare = "gradients"
    training: Training = field(default_factory=Training)
    seeds: Seeds = "alike"
    steps: Steps = 1
    plant: str = ""
    observe: ElementSample[str] | None = None
    look_for_float32: bool = False
    log_operations: bool = False
    order: tuple[int, ...] = ()
    log_draws: bool = False
    at_each_step: bool = False
    after_clipping: bool = False
    read_order: tuple[int, ...] = ()
    truth: str = ""
    compared_from: int = 0

    @property
    def trains(self) -> bool:
        """True if the step steps with an optimizer of its own."""
        if isinstance(self.step, str):
            return STRATEGIES[self.step].trains and self.compare == "update"
        return self.compare == "update" or self.at_each_step

    @property
    def is_given_all_at_once(self) -> bool:
        """True if the step is the user's own and is called once, with all big batches' examples."""
        return self.trains and not (isinstance(self.step, str) or is_prepared(self.step))

    @property
    def keeps_weights(self) -> bool:
        """True if the weights before the step are needed afterwards."""
        return self.compare == "update"


class OfOptimizers(TypedDict, total=False):
    """The fields of Evidence about optimizers and clipping."""

    optimizer_steps: int
    clips: tuple[ClipCall, ...]
    steps_copies: bool
    changed_after_clipping: bool
    settings: Mapping[GradientKey, Settings]


@dataclass(frozen=True)
class Evidence:
    """The proof of what happened on one rank.

    ``examples``: for each step, the positions in the big batch of the examples that the rank was
    given; None if the step chooses them itself. ``data``: a digest of those examples for every leaf
    of the batch. ``inputs``: a digest of all tensors that the model was called with; None if it was
    never called with gradients enabled, or if they are not known. ``came_back``: sums of the
    gradients of what the model returned. ``called_with_given_rows``: a copy of something that was
    dealt to the rank was among these tensors. ``start``: a digest of the weights before the first
    step. ``collectives``: all that the rank issued; None if torch has no flight recorder.
    ``gpu``: the physical GPUs that hold its weights and gradients, see ``cuda_evidence``; "" on the
    CPU. ``tf32``: whether TF32 was allowed in float32; None on the CPU.
    ``gradients``: the description of every gradient that the rank left. ``notes``: what the
    strategy wrote down to prove that it ran. ``planted``: how often a planted fault did its damage;
    None if none was planted. ``observed``: what was seen of the step, if it was watched.
    ``autocast``: the autocast regions that it entered with gradients enabled. ``float32_at``: where
    it computed in float32, if this was looked for; "" if it did not. ``missed_waits``: the
    collectives that nobody waited for. ``changed_later``: the gradients that changed after the step
    had returned. ``operations``: those of torch that the step ran, if they were recorded.
    ``buffers``: a digest of every buffer of the model after the last step; ``buffers_left``: what
    they hold, unless they are large. ``libraries``: those that earlier work had imported on this
    rank. ``idle_data_parallel``: the step has called an nn.DataParallel that had no devices.
    ``optimizer_steps``: how often optimizers stepped in a step that trains; those that step
    together count as one where what is compared is taken at each of their steps. ``clips``: the
    calls by which torch clipped gradients, in a step that is judged at each step of its optimizer;
    otherwise those whose gradients are compared as they were before. ``steps_copies``: an optimizer
    stepped copies of the parameters, in such a step, and ``settings`` with which each stepped.
    ``changed_after_clipping``: gradients that torch had clipped were changed before a step.
    """

    examples: tuple[tuple[int, ...], ...] | None
    data: Digests
    inputs: str | None
    start: str
    collectives: tuple[Collective, ...] | None
    device: str
    gradients: Mapping[GradientKey, Description | None]
    notes: Mapping[str, Any] = field(default_factory=dict)
    planted: int | None = None
    observed: Observation | None = None
    came_back: tuple[float, ...] = ()
    called_with_given_rows: bool = False
    autocast: frozenset[Autocast] = frozenset()
    float32_at: str = ""
    missed_waits: tuple[MissedWait, ...] = ()
    changed_later: tuple[str, ...] = ()
    gpu: str = ""
    tf32: Tf32 | None = None
    operations: Operations | None = None
    buffers: Mapping[str, str] = field(default_factory=dict)
    buffers_left: Mapping[str, Tensor] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    idle_data_parallel: bool = False
    optimizer_steps: int = 0
    clips: tuple[ClipCall, ...] = ()
    steps_copies: bool = False
    changed_after_clipping: bool = False
    settings: Mapping[GradientKey, Settings] = field(default_factory=dict)


# Whether a rank can call a step, and with what: model, shard and rank; or first model and rank.

RIGHT = "a function (model, shard, rank), or (model, rank) that returns a function of the shard"


def why_not_a_step(step: Callable[..., object]) -> str:
    """Says what would be right, if this cannot be called as a step; "" if it may be."""
    if inspect.iscoroutinefunction(step):
        return f"{RIGHT}; this one is a coroutine, which nobody awaits"
    if inspect.isgeneratorfunction(step):
        return f"{RIGHT}; this one is a generator, whose body would never run"
    if hasattr(step, "__signature__"):
        return ""  # it says what its author likes
    if is_prepared(step):
        return ""
    try:
        # A decorator may give the function that it wraps more arguments than it takes itself.
        signature = inspect.signature(step, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(None, None, None)
    except TypeError:
        names = signature.replace(
            parameters=[
                one.replace(annotation=inspect.Parameter.empty)
                for one in signature.parameters.values()
            ],
            return_annotation=inspect.Signature.empty,
        )
        return f"{RIGHT}; this one takes {names}"
    return ""


def is_prepared(step: object) -> bool:
    """True if the step is made once for all big batches: it takes two arguments, which are called
    ``model`` and ``rank``.
    """
    if isinstance(step, str):
        return False
    try:
        parameters = inspect.signature(step, follow_wrapped=False).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    positional = [one for one in parameters.values() if one.kind in POSITIONAL]
    if [one.name.strip("_") for one in positional[:2]] != ["model", "rank"]:
        return False
    return all(one.default is not inspect.Parameter.empty for one in positional[2:])


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
