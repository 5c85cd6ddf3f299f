"""What one rank does with a case: rebuild it, run the strategy or the step, send its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import move
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.case.build import build_model, build_whole_batch
from ddp_equivalence.case.given import given_to
from ddp_equivalence.case.random_state import seeded, step_seed, without_restoring_random_state
from ddp_equivalence.case.shards import OWN, Shards, split
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.batch_digest import digest_leaves
from ddp_equivalence.comparison.chunks import raw_messages
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.gradients import (
    describe,
    gradients_of,
    sgd_step,
    updates_of,
    weights_of,
)
from ddp_equivalence.faults.plant import PlantedFault, plant_here
from ddp_equivalence.measurement.observer import Observer
from ddp_equivalence.measurement.work import Evidence, Work
from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.strategy import Task, TrainStep


def run(rank: Rank, work: Work) -> Iterator[object]:
    """Yield the Evidence, then the gradients as lists of RawChunk."""
    with without_restoring_random_state():  # nothing else in this process draws random numbers
        model = build_model(work.case).to(rank.device)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        gradients, evidence = _run_step(rank, work, model)
    del model
    yield evidence
    if work.observe:
        return
    # Tensors that are not parameters of the model are never compared. They may be huge, so only
    # their description is sent, with the evidence.
    yield from raw_messages(
        {
            key: gradient
            for key, gradient in gradients.items()
            if gradient is None or gradient.shape == shapes.get(key[1])
        }
    )


def _run_step(
    rank: Rank, work: Work, model: nn.Module
) -> tuple[dict[GradientKey, Tensor | None], Evidence]:
    case = work.case
    start = digest(dict(model.named_parameters()))
    whole, sizes = build_whole_batch(case, work.steps)
    shards = [split(case.shards, size, case.ranks.world_size) for size in sizes]
    given = _given(rank, work, whole, sizes)
    data = digest_leaves(given)
    observer = Observer(model, whole, work.observe, case.batch_dims) if work.observe else None
    del whole
    given = [move(examples, rank.device) for examples in given]
    notes: dict[str, Any] = {}
    called = _CalledWith(model)
    planted = plant_here(work.plant) if work.plant else None
    with observer.watching() if observer else nullcontext(), planted or nullcontext():
        gradients = _train(rank, work, model, given, shards, notes, planted, observer)
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    collectives = new_collectives()
    dealt = None if case.shards == OWN else tuple(one.indices[rank.rank] for one in shards)
    evidence = Evidence(
        examples=dealt,
        data=data,
        inputs=called.digest(),
        start=start,
        collectives=collectives,
        device=str(rank.device),
        gradients=describe(gradients),
        notes=notes,
        planted=planted.fired if planted else None,
        observed=observer.found(gradients, collectives) if observer else None,
    )
    return gradients, evidence


class _CalledWith:
    """Records a digest of everything that the model is called with, whoever calls it."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[str] = []
        self._is_readable = True
        # Hidden from torch.compile, which would warn that it cannot trace the hook.
        listen = torch.compiler.disable(self._listen)
        model.register_forward_pre_hook(listen, with_kwargs=True)

    def _listen(self, model: nn.Module, *arguments: Any) -> None:
        try:
            self._seen += digest_leaves([arguments]).values()
        except Exception:  # any object may be an argument, also one that holds itself
            self._is_readable = False

    def digest(self) -> str | None:
        return " ".join(self._seen) if self._seen and self._is_readable else None


def _given(rank: Rank, work: Work, whole: Any, sizes: tuple[int, ...]) -> list[Any]:
    """The examples that the rank is given, still on the CPU.

    A user's own trainer is called once for all steps, so it is given their examples together.
    """
    strategy = STRATEGIES.get(work.step) if isinstance(work.step, str) else None
    undivided = work.case.shards == OWN or (strategy is not None and strategy.one_process)
    together = work.compare == "update" and strategy is None
    given = given_to(rank.rank, work.case, whole, sizes, undivided=undivided, together=together)
    # The tensors of an undivided batch may be the user's own, and the step may write to its batch.
    return [map_tensors(_copy, batch) for batch in given] if undivided else given


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _train(
    rank: Rank,
    work: Work,
    model: nn.Module,
    given: list[Any],
    shards: list[Shards],
    notes: dict[str, Any],
    planted: PlantedFault | None,
    observer: Observer | None,
) -> dict[GradientKey, Tensor | None]:
    """Run all steps; return the gradients that each step leaves, or the update of all together."""
    before = weights_of(model) if work.compare == "update" else {}
    task = Task(work.case, model, rank, shards, notes, work.steps)
    step: TrainStep
    if isinstance(work.step, str):
        step = STRATEGIES[work.step].prepare(task)
    else:
        user_step = work.step

        def step(shard: Any) -> Mapping[str, Tensor | None] | None:
            return user_step(model, shard, rank)

    if planted:
        step = planted.break_step(task, step)
    if work.compare == "update" and not isinstance(work.step, str):
        with _seeded(step_seed(work.case, 0)):
            return _in_first_step(_update_by_user(model, before, step(given[0])))
    gradients: dict[GradientKey, Tensor | None] = {}
    for number, shard in enumerate(given):
        if observer:
            observer.step = number
        last = number + 1 == len(given)
        returned = _one_step(rank, work, model, step, shard, number, several=len(given) > 1)
        if work.compare == "gradients":
            by_name = gradients_of(model) if returned is None else _by_name(returned)
            if len(given) > 1:
                # DDP's bucket views put the gradients of the next step into the same memory.
                by_name = {n: None if g is None else g.clone() for n, g in by_name.items()}
            gradients |= {(number, name): gradient for name, gradient in by_name.items()}
        if returned is not None and not last:
            _put_on_parameters(model, returned)
        if work.compare == "update" or not last:
            sgd_step(model, work.lr)
    if work.compare == "gradients":
        return gradients
    return _in_first_step(updates_of(model, before))


def _one_step(
    rank: Rank,
    work: Work,
    model: nn.Module,
    step: TrainStep,
    shard: Any,
    number: int,
    several: bool,
) -> Mapping[str, Tensor | None] | None:
    """Run one step. Raises ValueError if it moves the weights and is not the only step."""
    model.zero_grad(set_to_none=True)
    weights = digest(dict(model.named_parameters())) if several else ""
    with _seeded(step_seed(work.case, number)):
        returned = step(shard)
    moved = several and weights != digest(dict(model.named_parameters()))
    # Only rank 0 raises: on other ranks a new DDP wrapper may have copied the weights of rank 0.
    if moved and rank.rank == 0:
        raise ValueError(
            "the step moved the weights itself; the suite takes an SGD step after each of several "
            'steps, so leave the optimizer step out, or use compare="update"'
        )
    return returned


def _in_first_step(by_name: Mapping[str, Tensor | None]) -> dict[GradientKey, Tensor | None]:
    return {(0, name): tensor for name, tensor in by_name.items()}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators, and report a change if the step sets torch's seed itself."""
    with seeded(seed):
        yield
        if torch.initial_seed() != seed:
            process_state.report_change(f"torch's seed set to {torch.initial_seed()}")


def _put_on_parameters(model: nn.Module, gradients: Mapping[str, Tensor | None]) -> None:
    """Put gradients that the step returned where the suite's next SGD step finds them."""
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.detach().to(parameter.dtype)


def _update_by_user(
    model: nn.Module, before: dict[str, Tensor], returned: object
) -> dict[str, Tensor | None]:
    """How far a user's own training moved the weights: those in the model, or those returned."""
    if returned is None:
        return updates_of(model, before)
    weights = _by_name(returned)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found: dict[str, Tensor | None] = {name: None for name in before if name not in trained}
    # If the step returns a state_dict, it also holds buffers, and every name of shared parameters.
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    not_compared = {name for name, _ in model.named_buffers()} | (all_names - before.keys())
    for name, weight in weights.items():
        if name in not_compared:
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
