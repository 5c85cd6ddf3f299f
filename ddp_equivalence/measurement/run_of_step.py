"""Runs a strategy or a user's step on one rank, and takes what is compared from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.clipping import ClipCall, Clipping
from ddp_equivalence.case.optimizer_steps import AtSteps, StepCount, StepRecord
from ddp_equivalence.case.random_state import seed_in_use, seeded, step_seed
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.gradients import in_first_step, sgd_step, update_of
from ddp_equivalence.faults.plant import PlantedFault
from ddp_equivalence.measurement.declared_rows import DeclaredRows
from ddp_equivalence.measurement.observer import Observer
from ddp_equivalence.measurement.races import Races
from ddp_equivalence.measurement.returned import tensors_by_name
from ddp_equivalence.measurement.step_signature import is_prepared
from ddp_equivalence.measurement.whole_tensors import WholeTensors
from ddp_equivalence.measurement.work import Work
from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.groups_of_a_script import as_a_script_has_them
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.strategy import Task, TrainStep


class RunOfStep:
    """Everything that one run of the step on a rank needs.

    ``optimizer_steps``: how often an optimizer has stepped while a user's own step ran. ``clips``:
    the calls by which torch clipped gradients meanwhile; of a step that does not train, those whose
    gradients are compared as they were before.
    """

    def __init__(
        self,
        rank: Rank,
        work: Work,
        model: nn.Module,
        held: WholeTensors,
        races: Races,
        planted: PlantedFault | None,
        declared: DeclaredRows,
        observer: Observer | None,
    ) -> None:
        self._rank, self._work, self._model = rank, work, model
        self._held, self._races = held, races
        self._planted, self._declared, self._observer = planted, declared, observer
        self.optimizer_steps = 0
        self.clips: tuple[ClipCall, ...] = ()

    def train(self, task: Task, given: list[Any]) -> dict[GradientKey, Tensor | None]:
        """Run all steps; return the gradients that each step leaves, or the updates."""
        work = self._work
        before = self._held.weights() if work.keeps_weights else {}
        with as_a_script_has_them(self._rank):
            return self._train(task, given, before)

    def _train(
        self, task: Task, given: list[Any], before: Mapping[str, Tensor]
    ) -> dict[GradientKey, Tensor | None]:
        work = self._work
        step = self._prepared(task)
        if self._planted:
            step = self._planted.break_step(task, step)
        run = self._run_trainer if work.trains else self._run_steps
        return run(step, given, before)

    def _prepared(self, task: Task) -> TrainStep:
        """The function that takes the rank's examples."""
        work, model, rank = self._work, self._model, self._rank
        if isinstance(work.step, str):
            return STRATEGIES[work.step].prepare(task)
        user_step: Any = work.step
        if not is_prepared(user_step):
            return lambda shard: user_step(model, shard, rank)
        with self._seeded(0), self._races.watched():
            step = user_step(model, rank)
        if not callable(step):
            raise TypeError(
                f"{name_of(user_step)}(model, rank) must return a step, a function of the shard; "
                f"it returned {type(step).__name__}"
            )

        def prepared(shard: Any) -> Mapping[str, Tensor | None] | None:
            returned: Mapping[str, Tensor | None] | None = step(shard)
            return returned

        return prepared

    def _run_trainer(
        self, step: TrainStep, given: list[Any], before: Mapping[str, Tensor]
    ) -> dict[GradientKey, Tensor | None]:
        """Run a user's step that trains by itself, and take what it did to the weights."""
        work = self._work
        record = self._record() if work.at_each_step else None
        count: StepCount = record or StepCount()
        returned: object = None
        with count.watched():
            for number, shard in enumerate(given):
                self._declared.begin(number)
                if self._observer and not work.at_each_step:
                    self._observer.step = number
                with self._seeded(number), self._races.watched():
                    returned = step(shard)
        self.optimizer_steps = count.seen if record is None else record.count
        self.clips = () if record is None else tuple(record.clips)
        if record is None:
            if returned is None:
                return in_first_step(self._held.updates(before))
            weights = self._held.returned(tensors_by_name(returned))
            return in_first_step(self._held.updates_to(weights, before))
        if work.compare == "gradients":
            return record.gradients
        trained = self._held.trained()
        return {
            (number, name): update_of(weight, before.get(name), name not in trained)
            for (number, name), weight in record.weights.items()
        }

    def _record(self) -> StepRecord:
        gradients = self._work.compare == "gradients"

        def ended(count: int) -> None:
            if self._observer:
                self._observer.step = count

        return StepRecord(
            self._held.parameters,
            AtSteps(gradients, self._work.after_clipping),
            ended,
            self._held.whole,
            self._held.weights,
        )

    def _run_steps(
        self, step: TrainStep, given: list[Any], before: Mapping[str, Tensor]
    ) -> dict[GradientKey, Tensor | None]:
        """Run a step once for each big batch, with a step of the suite's SGD between two."""
        work, model, held = self._work, self._model, self._held
        gradients: dict[GradientKey, Tensor | None] = {}
        for number, shard in enumerate(given):
            self._declared.begin(number)
            if self._observer:
                self._observer.step = number
            last = number + 1 == len(given)
            weights = held.digest() if len(given) > 1 else ""
            returned = self._one_step(step, shard, number)
            if work.compare == "gradients":
                by_name = held.gradients() if returned is None else returned
                # DDP's bucket views put the gradients of the next step into the same memory.
                left = self._races.as_left(by_name, keep=len(given) > 1)
                gradients |= {(number, name): gradient for name, gradient in left.items()}
            self._check_weights(weights)
            if returned is not None and (work.compare == "update" or not last):
                held.give_gradients(returned)
            if work.compare == "update" or not last:
                sgd_step(model, work.training.lr)
        if work.compare == "gradients":
            return gradients
        return in_first_step(held.updates(before))

    def _one_step(
        self, step: TrainStep, shard: Any, number: int
    ) -> Mapping[str, Tensor | None] | None:
        """Run one step, and return what it returned, under the model's own names; if it has clipped
        gradients in the end, return them as they were before.
        """
        self._model.zero_grad(set_to_none=True)
        clipping = Clipping()
        of_the_user = not isinstance(self._work.step, str) and not self._work.after_clipping
        kept = clipping.watched() if of_the_user else nullcontext()
        with self._seeded(number), self._races.watched(), kept:
            returned = step(shard)
        if returned is not None:
            return self._held.returned(self._before(clipping, tensors_by_name(returned)))
        left = {name: one.grad for name, one in self._held.parameters().items()}
        before = self._before(clipping, left)
        return None if before is left else self._held.whole(dict(before))

    def _before(
        self, clipping: Clipping, left: Mapping[str, Tensor | None]
    ) -> Mapping[str, Tensor | None]:
        """The gradients as they were before they were clipped, or as they were ``left``."""
        before = clipping.before(left.values())
        if not before or len(before) < clipping.last_count:
            return left
        self.clips += tuple(clipping.calls)
        return {name: before.get(id(gradient), gradient) for name, gradient in left.items()}

    def _check_weights(self, before: str) -> None:
        """Raises ValueError if one of several steps has moved the weights.

        ``before``: a digest of the weights before the step; "" for the only step.
        """
        # Only rank 0 raises: elsewhere a new DDP wrapper may have copied the weights of rank 0.
        if before and before != self._held.digest() and self._rank.rank == 0:
            raise ValueError(
                "the step moved the weights itself; the suite takes an SGD step after each of "
                'several steps, so leave the optimizer step out, or use compare="update"'
            )

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """Seed the generators, and report a change if the step sets torch's seed itself."""
        seed = step_seed(self._work.case, number, self._rank.rank, self._work.seeds)
        with seeded(seed):
            yield
            for now in dict.fromkeys((torch.initial_seed(), seed_in_use())):
                if now != seed:
                    process_state.report_change(f"torch's seed set to {now}")
