"""What one rank does with a case: rebuild it, run the strategy or the step, send its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.case.build import build_model, build_whole_batch
from ddp_equivalence.case.given import given_to
from ddp_equivalence.case.random_state import without_restoring_random_state
from ddp_equivalence.case.shards import OWN, Shards, split
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.batch_digest import Digests, digest_leaves
from ddp_equivalence.comparison.chunks import raw_messages
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.gradients import describe
from ddp_equivalence.faults.plant import plant_here
from ddp_equivalence.measurement.buffer_watch import digests_of_buffers
from ddp_equivalence.measurement.buffers_left import buffers_left
from ddp_equivalence.measurement.called_with import CalledWith
from ddp_equivalence.measurement.calling_thread import backward_on_calling_thread
from ddp_equivalence.measurement.cuda_evidence import gpus_used, tf32_of
from ddp_equivalence.measurement.declared_rows import DeclaredRows
from ddp_equivalence.measurement.draws_on_rank import with_draws
from ddp_equivalence.measurement.example_lookup import ExampleLookup
from ddp_equivalence.measurement.idle_data_parallel import IdleDataParallel
from ddp_equivalence.measurement.observer import Observer
from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.measurement.parameter_names import ParameterNames
from ddp_equivalence.measurement.precision_watch import Float32Watch, autocast_entered
from ddp_equivalence.measurement.races import Races
from ddp_equivalence.measurement.random_draws import DrawLog
from ddp_equivalence.measurement.run_of_step import RunOfStep
from ddp_equivalence.measurement.whole_tensors import WholeTensors
from ddp_equivalence.measurement.work import Evidence, Work
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.libraries import libraries
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.strategy import Task


def run(rank: Rank, work: Work) -> Iterator[object]:
    """Yield the Evidence, then the gradients as lists of RawChunk."""
    with without_restoring_random_state():  # nothing else in this process draws random numbers
        model = build_model(work.case)
        if any(one.device != rank.device for one in (*model.parameters(), *model.buffers())):
            model.to(rank.device)
        names = ParameterNames(model)
        gradients, evidence = _run_step(rank, work, model, names)
    shapes = names.shapes
    del model, names
    yield evidence
    if work.observe or work.look_for_float32 or work.log_operations:
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
    rank: Rank, work: Work, model: nn.Module, names: ParameterNames
) -> tuple[dict[GradientKey, Tensor | None], Evidence]:
    case, start = work.case, digest(dict(model.named_parameters()))
    shards, given, data, declared, observer = _data(rank, work, model)
    notes, races = dict[str, Any](), Races(rank.device)
    draws = DrawLog(lambda: len(observer.backwards)) if observer and work.log_draws else None
    called = CalledWith(given, in_any_order=case.shards == OWN)
    planted = plant_here(work.plant) if work.plant else None
    float32 = Float32Watch() if work.look_for_float32 else None
    log = OperationLog() if work.log_operations else None
    held, idle = WholeTensors(model, names), IdleDataParallel(model)
    with (
        held.recorded(),
        idle.watched(),
        declared.listening(),
        called.recording(model),
        autocast_entered() as autocast,
        observer.watching() if observer else nullcontext(),
        planted or nullcontext(),
        backward_on_calling_thread() if float32 else nullcontext(),
        float32 or nullcontext(),
        log or nullcontext(),
        draws.watching() if draws else nullcontext(),
    ):
        run_of_step = RunOfStep(rank, work, model, held, races, planted, declared, observer)
        gradients = run_of_step.train(Task(case, model, rank, shards, notes, work.steps), given)
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    collectives = new_collectives()
    observed = observer.found(gradients, collectives) if observer else None
    dealt = None if case.shards == OWN else tuple(one.indices[rank.rank] for one in shards)
    evidence = Evidence(
        examples=dealt,
        data=data,
        inputs=called.arguments,
        came_back=called.came_back,
        called_with_given_rows=called.given_rows,
        start=start,
        collectives=collectives,
        device=str(rank.device),
        gradients=describe(gradients),
        notes=notes,
        planted=planted.fired if planted else None,
        observed=observed and with_draws(observed, draws, gradients, work.observe),
        autocast=frozenset(autocast),
        float32_at=float32.found if float32 else "",
        operations=log.found(_of_first_step(gradients)) if log else None,
        missed_waits=tuple(races.missed_waits),
        changed_later=tuple(dict.fromkeys(races.changed_later)),
        gpu=gpus_used(rank, chain(model.parameters(), gradients.values()), notes),
        tf32=tf32_of(rank),
        buffers=digests_of_buffers(model),
        buffers_left=buffers_left(model, names.buffers),
        libraries=libraries.of_earlier_work,
        idle_data_parallel=idle.called,
        optimizer_steps=run_of_step.optimizer_steps,
        clips=run_of_step.clips,
    )
    return gradients, evidence


def _data(
    rank: Rank, work: Work, model: nn.Module
) -> tuple[list[Shards], list[Any], Digests, DeclaredRows, Observer | None]:
    """The shards of each step, what the rank is given of them, digests of that, the rows that the
    step may declare, and an observer of the step if it is watched.
    """
    case = work.case
    whole, sizes = build_whole_batch(case, work.steps)
    if work.order:
        whole = take(whole, work.order, case.batch_dims)
    shards = [split(case.shards, size, case.ranks.world_size) for size in sizes]
    given = _given(rank, work, whole, sizes)
    data = digest_leaves(given)
    given = [move(examples, rank.device) for examples in given]
    at = _positions(rank, sizes, shards, len(given))
    if work.read_order:  # what is read is looked up where the reference has it
        whole = take(whole, work.read_order, case.batch_dims)
        at = [tuple(map(work.read_order.index, indices)) for indices in at]
    declared = DeclaredRows(at)
    if work.observe is None:
        return shards, given, data, declared, None
    lookup = ExampleLookup(whole, tuple(zip(given, at, strict=True)), case.batch_dims)
    return shards, given, data, declared, Observer(model, lookup, declared, work.observe)


def _of_first_step(gradients: Mapping[GradientKey, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: gradient for (step, name), gradient in gradients.items() if step == 0}


def _given(rank: Rank, work: Work, whole: Any, sizes: tuple[int, ...]) -> list[Any]:
    """The examples that the rank is given, still on the CPU.

    A user's own trainer is called once for all steps, so it is given their examples together,
    unless it is prepared once and then called for every step.
    """
    strategy = STRATEGIES.get(work.step) if isinstance(work.step, str) else None
    undivided = work.case.shards == OWN or (strategy is not None and strategy.one_process)
    given = given_to(
        rank.rank, work.case, whole, sizes, undivided=undivided, together=work.is_given_all_at_once
    )
    # The step may write to its batch. Tensors that are not dealt may be the user's own, and those
    # that every rank has whole are the same ones in all steps.
    has_whole = undivided or work.case.batch_dims is not None
    return [map_tensors(_copy, batch) for batch in given] if has_whole else given


def _copy(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _positions(
    rank: Rank, sizes: Sequence[int], shards: list[Shards], times: int
) -> list[tuple[int, ...]]:
    """The positions of the rank's examples among those of all steps: for each step, or joined if
    the rank is given examples only once. ``times``: how often it is given some.
    """
    positions = [
        tuple(sum(sizes[:step]) + index for index in of_step.indices[rank.rank])
        for step, of_step in enumerate(shards)
    ]
    return [tuple(chain.from_iterable(positions))] if times == 1 else positions
