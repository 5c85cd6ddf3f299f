"""What one process of an observed script has done since the last step of its optimizers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ddp_equivalence.observed_scripts.places import Place
from ddp_equivalence.observed_scripts.recorded_step import Event, SeenCall, SeenClip
from ddp_equivalence.observed_scripts.rows import Rows


@dataclass
class StepInProgress:
    """What has happened since the last step of an optimizer.

    ``own``: this process's own gradients, before any reduction, without a loss scale, summed over
    the backward passes; ``own_of_each``: the same of each backward pass. ``call_rows``: what each
    of ``calls`` was given; ``results``: the mark of what it returned. ``weights``: digests of the
    tensors of every module at its first call; ``states``: the tensors, on rank 0. ``scales``: the
    loss scale of each backward pass. ``stale``: gradients that were there before the first one.
    ``left``: what the buffers of one process held before those of the record replaced them.
    ``generators``: states of torch's generator, by the event before which they were taken.
    ``optimizer``: the one that steps. ``by_grad``: its backward passes were calls of
    ``torch.autograd.grad``. ``in_python``: what the script held when it first called a module.
    """

    own: dict[str, Tensor] = field(default_factory=dict)
    own_of_each: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    calls: list[SeenCall] = field(default_factory=list)
    call_rows: list[Rows] = field(default_factory=list)
    results: list[float] = field(default_factory=list)
    events: Counter[tuple[str, int]] = field(default_factory=Counter)
    clips: list[SeenClip] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    generators: dict[Event, Tensor] = field(default_factory=dict)
    before_clip: dict[str, Tensor | None] | None = None
    stale: dict[str, Tensor] = field(default_factory=dict)
    backward_at: list[Place] = field(default_factory=list)
    draws: bool = False
    held: dict[str, Tensor | None] = field(default_factory=dict)
    optimizers: list[str] = field(default_factory=list)
    unnamed: int = 0
    frozen: dict[str, Place] = field(default_factory=dict)
    stepped_at: Place = field(default_factory=Place)
    optimizer: Any = None
    autocast: set[str] = field(default_factory=set)
    batch_norm: bool = False
    by_grad: bool = False
    in_python: dict[str, str] = field(default_factory=dict)

    def forget_grads(self) -> None:
        """The script goes backward after all: what ``torch.autograd.grad`` computed until now is a
        part of a loss, such as a penalty, or of a step inside the step.
        """
        self.by_grad = False
        for one in (self.losses, self.scales, self.backward_at, self.own_of_each, self.own):
            one.clear()
        self.calls = [replace(call, backwards=0) for call in self.calls]
        self.events, before, self.generators = Counter(), self.generators, {}
        for event, state in before.items():
            number = self.events[event.kind, 0]
            self.events[event.kind, 0] += 1
            self.generators[Event(event.kind, 0, number)] = state
