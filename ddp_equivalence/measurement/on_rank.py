"""What one rank does with a case: rebuild it, run the strategy or step, hand back what it left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import concatenate, count_examples, move, take
from ddp_equivalence.case.build import build_batches, build_model
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.random_state import seeded, step_seed, without_restoring_random_state
from ddp_equivalence.case.shards import OWN, Shards, split
from ddp_equivalence.case.steps import Compare, Steps, in_step
from ddp_equivalence.comparison.chunks import raw_messages
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.gradients import (
    Description,
    describe,
    gradients_of,
    sgd_step,
    updates_of,
    weights_of,
)
from ddp_equivalence.faults.plant import PlantedFault, plant_here
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.observer import Observer
from ddp_equivalence.ranks import Rank, process_state
from ddp_equivalence.ranks.collectives import Collective, new_collectives
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.strategy import Task, TrainStep

Step = Callable[[nn.Module, Any, Rank], Mapping[str, Tensor | None] | None]
"""A user's own step: (model, shard, rank) -> None, or gradients (weights, for updates) by name."""


@dataclass(frozen=True)
class Work:
    """What every rank is given: names, seeds and functions, no tensors."""

    case: Case
    step: Step | str
    compare: Compare = "gradients"
    lr: float = 0.1
    steps: Steps = 1
    plant: str = ""
    """The fault to plant; "" for none."""
    observe: ElementSample | None = None
    """Watch the step closely, and send nothing of the gradients but this."""

    @property
    def count(self) -> int:
        """How many steps are compared by name: updates are compared once, at the end."""
        if self.compare == "update":
            return 1
        return self.steps if isinstance(self.steps, int) else len(self.steps)


@dataclass(frozen=True)
class Evidence:
    """What really happened on one rank.

    ``examples``: positions in the big batch that the rank was given, by step; None where the step
    takes its own. ``data``: digest of those examples. ``inputs``: digest of what the model was
    called with; None if it never was. ``start``: digest of the weights before.
    ``collectives``: None if torch has no flight recorder. ``planted``: how often a planted fault
    fired, None if none was planted. ``observed``: what a closer look saw.
    """

    examples: tuple[tuple[int, ...], ...] | None
    data: str
    inputs: str | None
    start: str
    collectives: tuple[Collective, ...] | None
    device: str
    gradients: Mapping[str, Description | None]
    notes: Mapping[str, Any] = field(default_factory=dict)
    planted: int | None = None
    observed: Observation | None = None


def run(rank: Rank, work: Work) -> Iterator[object]:
    """Yield the Evidence, then the gradients as lists of RawChunk."""
    with without_restoring_random_state():  # nothing else here draws random numbers
        model = build_model(work.case).to(rank.device)
        shapes = {
            in_step(name, step, work.count): parameter.shape
            for name, parameter in model.named_parameters()
            for step in range(work.count)
        }
        found, evidence = _done(rank, work, model)
    del model
    yield evidence
    if work.observe:
        return
    # What is none of the model's is not compared, and may be huge: its description will do.
    yield from raw_messages(
        {name: g for name, g in found.items() if g is None or g.shape == shapes.get(name)}
    )


def _done(rank: Rank, work: Work, model: nn.Module) -> tuple[dict[str, Tensor | None], Evidence]:
    case = work.case
    start = digest(dict(model.named_parameters()))
    batches = build_batches(case, work.steps)
    deals = [split(case.shards, count_examples(b), case.ranks.world_size) for b in batches]
    given = _given(rank, work, batches, deals)
    data = digest(
        (str(place), leaf)
        for place, leaf in enumerate(pytree.tree_leaves(given))
        if isinstance(leaf, Tensor)
    )
    observer = Observer(model, concatenate(batches), work.observe) if work.observe else None
    del batches
    notes: dict[str, Any] = {}
    called = _CalledWith(model)
    planted = plant_here(work.plant) if work.plant else None
    with observer.watching() if observer else nullcontext(), planted or nullcontext():
        found = _train(rank, work, model, given, deals, notes, planted, observer)
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    collectives = new_collectives()
    mine = None if case.shards == OWN else tuple(deal.indices[rank.rank] for deal in deals)
    evidence = Evidence(
        examples=mine,
        data=data,
        inputs=called.digest(),
        start=start,
        collectives=collectives,
        device=str(rank.device),
        gradients=describe(found),
        notes=notes,
        planted=planted.fired if planted else None,
        observed=observer.found(found, collectives) if observer else None,
    )
    return found, evidence


class _CalledWith:
    """Listens to what a model is called with, whoever calls it."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[str] = []
        # Not for torch.compile to look into: it would warn that it cannot.
        listen = torch.compiler.disable(self._listen)
        model.register_forward_pre_hook(listen, with_kwargs=True)

    def _listen(self, model: nn.Module, *arguments: Any) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._seen.append(digest((str(place), leaf) for place, leaf in enumerate(leaves)))

    def digest(self) -> str | None:
        return " ".join(self._seen) or None


def _given(rank: Rank, work: Work, batches: list[Any], deals: list[Shards]) -> list[Any]:
    """The rank's examples of every step, on its device."""
    strategy = STRATEGIES.get(work.step) if isinstance(work.step, str) else None
    if work.case.shards == OWN or (strategy and strategy.one_process):
        return [move(batch, rank.device) for batch in batches]
    return [
        move(take(batch, deal.indices[rank.rank]), rank.device)
        for batch, deal in zip(batches, deals, strict=True)
    ]


def _train(
    rank: Rank,
    work: Work,
    model: nn.Module,
    given: list[Any],
    deals: list[Shards],
    notes: dict[str, Any],
    planted: PlantedFault | None,
    observer: Observer | None,
) -> dict[str, Tensor | None]:
    before = weights_of(model) if work.compare == "update" else {}
    task = Task(work.case, model, rank, deals, notes, work.steps)
    step: TrainStep
    if isinstance(work.step, str):
        step = STRATEGIES[work.step].prepare(task)
    else:
        own = work.step

        def step(shard: Any) -> Mapping[str, Tensor | None] | None:
            return own(model, shard, rank)

    if planted:
        step = planted.break_step(task, step)
    if work.compare == "update" and not isinstance(work.step, str):
        with _seeded(step_seed(work.case, 0)):
            return _own_update(model, before, step(concatenate(given)))

    found: dict[str, Tensor | None] = {}
    for number, shard in enumerate(given):
        if observer:
            observer.step = number
        model.zero_grad(set_to_none=True)
        weights = digest(dict(model.named_parameters())) if len(given) > 1 else ""
        with _seeded(step_seed(work.case, number)):
            returned = step(shard)
        moved = bool(weights) and weights != digest(dict(model.named_parameters()))
        # Other ranks may have been given rank 0's weights by a new wrapper.
        if moved and rank.rank == 0:
            raise ValueError(
                "the step moved the weights itself; between several steps the suite takes the SGD "
                'step, so leave it out, or use compare="update"'
            )
        if work.compare == "gradients":
            gradients = gradients_of(model) if returned is None else _by_name(returned)
            if len(given) > 1:
                # DDP's bucket views hold the gradients of the next step in the same memory.
                gradients = {n: None if g is None else g.clone() for n, g in gradients.items()}
            found |= {in_step(name, number, len(given)): g for name, g in gradients.items()}
        last = number + 1 == len(given)
        if returned is not None and not last:
            _put_on_parameters(model, returned)
        if work.compare == "update" or not last:
            sgd_step(model, work.lr)
    return found if work.compare == "gradients" else updates_of(model, before)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators; a step that sets torch's seed itself is remarked on."""
    with seeded(seed):
        yield
        if torch.initial_seed() != seed:
            process_state.remark(f"torch's seed set to {torch.initial_seed()}")


def _put_on_parameters(model: nn.Module, gradients: Mapping[str, Tensor | None]) -> None:
    """Gradients that the step returned by name are those that the next SGD step takes."""
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.detach().to(parameter.dtype)


def _own_update(
    model: nn.Module, before: dict[str, Tensor], returned: object
) -> dict[str, Tensor | None]:
    if returned is None:
        return updates_of(model, before)
    weights = _by_name(returned)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, Tensor | None] = {name: None for name in before if name not in trained}
    # A state_dict also has buffers, and a shared parameter under every name.
    every = dict(model.named_parameters(remove_duplicate=False))
    more = {name for name, _ in model.named_buffers()} | (every.keys() - before.keys())
    for name, weight in weights.items():
        if name in more:
            continue
        if weight is None or name not in before or weight.shape != before[name].shape:
            found[name] = weight
        elif name in trained:
            found[name] = weight.detach().to(before[name].device) - before[name]
    return found


def _by_name(returned: object) -> dict[str, Tensor | None]:
    right = "None, or a dict of parameter name -> tensor"
    if not isinstance(returned, Mapping):
        raise TypeError(f"the step returned {type(returned).__name__}; expected {right}")
    for name, value in returned.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, Tensor)):
            raise TypeError(f"the step returned {name!r}: {type(value).__name__}; expected {right}")
    return dict(returned)
