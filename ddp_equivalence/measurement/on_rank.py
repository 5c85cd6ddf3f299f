"""One rank's work on a case: it rebuilds the case, runs the step, and sends its gradients."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.case.build import build_model, build_whole_batch, given_to, named_state
from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.memory import give_back_memory
from ddp_equivalence.case.random_state import (
    seed_in_use,
    seeded,
    step_seed,
    without_restoring_random_state,
)
from ddp_equivalence.case.shards import OWN, Shards, split
from ddp_equivalence.case.training import (
    AtSteps,
    Clipping,
    GradientKey,
    StepCount,
    StepRecord,
    update_of,
)
from ddp_equivalence.comparison.chunks import raw_messages
from ddp_equivalence.comparison.gradients import (
    Digests,
    ElementSample,
    describe,
    digest,
    digest_leaves,
    gathered,
    in_first_step,
    sgd_step,
)
from ddp_equivalence.comparison.shared import compared_here
from ddp_equivalence.faults.plant import PlantedFault, plant_here
from ddp_equivalence.measurement.calls import NotPlain, plain
from ddp_equivalence.measurement.draws import DrawLog
from ddp_equivalence.measurement.edited_code import (
    CannotEdit,
    EditedCode,
    kept_inside,
    run_as_edited,
)
from ddp_equivalence.measurement.example_lookup import ExampleLookup
from ddp_equivalence.measurement.gradient_watch import digests_of_buffers
from ddp_equivalence.measurement.names_held import StepLog
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.observer import (
    CalledWith,
    IdleDataParallel,
    LocalsSeen,
    Observer,
    backward_on_calling_thread,
)
from ddp_equivalence.measurement.operation_log import Float32Watch, autocast_entered
from ddp_equivalence.measurement.returned import (
    DeclaredRows,
    gpus_used,
    no_parameters,
    tensors_by_name,
    tf32_of,
)
from ddp_equivalence.measurement.whole_tensors import WholeTensors, original_parameters
from ddp_equivalence.measurement.work import Evidence, OfOptimizers, Work, is_prepared
from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.collectives import (
    MissedWait,
    missed_waits,
    new_collectives,
    of_the_suite,
)
from ddp_equivalence.ranks.process_state import as_a_script_has_them, libraries
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.strategy import Task, TrainStep

# What one rank does with a case: rebuild it, run the strategy or the step, send its gradients.


def run(rank: Rank, work: Work) -> Iterator[object]:
    """Yield the Evidence, then the gradients as lists of RawChunk; or how they compare, if the rank
    can read the true ones.
    """
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
        del gradients, evidence
        give_back_memory(sum(map(prod, shapes.values())))
        return
    # Tensors that are not parameters of the model are never compared. They may be huge, so only
    # their description is sent, with the evidence.
    compared = {
        key: gradient
        for key, gradient in gradients.items()
        if gradient is None or gradient.shape == shapes.get(key[1])
    }
    here = None
    if compares_here(work, shapes):
        with of_the_suite(), torch.no_grad():
            here = compared_here(work.truth, compared)
            if here is None:  # it cannot be read, so nothing stays sharded
                compared = {
                    key: None if one is None else gathered(one) for key, one in compared.items()
                }
    if here is None:
        yield from raw_messages(compared)
        return
    yield here
    del gradients, compared
    give_back_memory()


def compares_here(work: Work, shapes: Mapping[str, torch.Size]) -> bool:
    """True if a rank compares the gradients of parameters of these shapes itself."""
    return bool(work.truth) and sum(map(prod, shapes.values())) >= work.compared_from


def _may_stay_sharded(work: Work, shapes: Mapping[str, torch.Size]) -> bool:
    """True if nobody needs whole gradients: they are compared here, or the run is only watched."""
    if work.observe is not None and not work.log_draws:
        return not work.observe.is_whole
    return compares_here(work, shapes)


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
    log = StepLog() if work.log_operations else None
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
        gradients = run_of_step.train(
            Task(case, model, rank, shards, notes, work.steps, work.training.lr), given
        )
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    collectives = new_collectives()
    observed = observer.found(gradients, collectives) if observer else None
    return gradients, Evidence(
        examples=None if case.shards == OWN else tuple(one.indices[rank.rank] for one in shards),
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
        **run_of_step.of_optimizers,
    )


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
    given = given_here(rank, work, whole, sizes)
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


def given_here(rank: Rank, work: Work, whole: Any, sizes: tuple[int, ...]) -> list[Any]:
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


# Runs a strategy or a user's step on one rank, and takes what is compared from it.


class RunOfStep:
    """Everything that one run of the step on a rank needs.

    ``of_optimizers``: what Evidence says of optimizers and clipping, by field: how often one has
    stepped while a user's own step ran, and the calls by which torch clipped gradients meanwhile.
    ``clipping``: makes what watches torch clip in one step.
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
        clipping: Callable[[], Clipping] = Clipping,
    ) -> None:
        self._rank, self._work, self._model = rank, work, model
        self._clipping = clipping
        self._held, self._races = held, races
        self._planted, self._declared, self._observer = planted, declared, observer
        self.of_optimizers = OfOptimizers()

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
        """Run a step that trains by itself, and take what it did to the weights."""
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
        self.of_optimizers = {"optimizer_steps": count.seen}
        if record is not None:
            self.of_optimizers = {
                "optimizer_steps": record.count,
                "clips": tuple(record.clips),
                "steps_copies": record.steps_copies,
                "changed_after_clipping": record.changed_after_clipping,
                "settings": record.settings,
            }
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
                stay = len(given) == 1 and _may_stay_sharded(work, held.shapes)
                by_name = held.gradients(sharded=stay) if returned is None else returned
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
        clipping = self._clipping()
        of_the_user = not isinstance(self._work.step, str) and not self._work.after_clipping
        kept = clipping.watched() if of_the_user else nullcontext()
        with self._seeded(number), self._races.watched(), kept:
            returned = step(shard)
        if returned is not None:
            return self._held.returned(self._before(clipping, tensors_by_name(returned)))
        left = {name: one.grad for name, one in self._held.parameters().items()}
        before = self._before(clipping, left)
        return None if before is left else self._held.whole(dict(before), {})

    def _before(
        self, clipping: Clipping, left: Mapping[str, Tensor | None]
    ) -> Mapping[str, Tensor | None]:
        """The gradients as they were before they were clipped, or as they were ``left``."""
        before = clipping.before(left.values())
        if not before or len(before) < clipping.last_count:
            return left
        clips = self.of_optimizers.get("clips", ())
        self.of_optimizers["clips"] = (*clips, *clipping.calls)
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


# What one rank does in a trial of an edited step.


@dataclass(frozen=True)
class Trial:
    """The step is run with ``edited`` code and may change nothing outside its process.

    None: it is run as it is, and what it runs is recorded.
    """

    work: Work
    edited: EditedCode | None = None


@dataclass(frozen=True)
class TrialFailed:
    """The step raised an exception on the rank, which can work on.

    ``what``: its type and text. ``acted_outside``: what the step would have done outside its
    process; "" if nothing. ``was_edited``: False if the edit could not be made, and nothing ran.
    """

    what: str
    acted_outside: str = ""
    was_edited: bool = True


def run_trial(rank: Rank, trial: Trial) -> Iterator[object]:
    """Yield what ``on_rank.run`` yields, or one TrialFailed.

    Without an edit, a LocalsSeen comes first.
    """
    failed: TrialFailed | None = None
    results: list[object] = []
    seen = LocalsSeen()
    block: AbstractContextManager[None] = seen.watching()
    if trial.edited is not None:
        case = trial.work.case
        block = run_as_edited(trial.edited, (trial.work.step, case.loss, case.model))
    with kept_inside() as prevented:
        try:
            with block:
                results += run(rank, trial.work)
        except CannotEdit as error:
            failed = TrialFailed(str(error), was_edited=False)
        except Exception as error:
            failed = TrialFailed(f"{type(error).__name__}: {error}")
            traceback.clear_frames(error.__traceback__)
    if prevented:
        failed = TrialFailed("it would act outside its process", prevented[0])
    if trial.edited is None:
        yield seen
    if failed is not None:
        yield failed
    else:
        yield from results


# Adds to what was seen of a rank the random numbers that it drew.


def with_draws(
    observed: Observation,
    log: DrawLog | None,
    gradients: Mapping[GradientKey, Tensor | None],
    sample: ElementSample[str] | None,
) -> Observation:
    """``gradients``: what the step left when these numbers were drawn."""
    if log is None or sample is None or not log.complete:
        return observed
    left = {
        name: sample.of_one(name, gradient)
        for (step, name), gradient in gradients.items()
        if step == 0 and gradient is not None and name in sample.sizes
    }
    return replace(observed, draws=tuple(log.draws), left=left)


# What a step had begun and had not waited for when it returned.


@dataclass
class Races:
    """The races that are found in the steps of one rank, which computes on ``device``.

    ``missed_waits``: the collectives that were never waited for. ``changed_later``: the names of
    gradients that changed after their step had returned.
    """

    device: torch.device
    missed_waits: list[MissedWait] = field(default_factory=list)
    changed_later: list[str] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The block runs a step."""
        with missed_waits(self.device) as missed:
            yield
        self.missed_waits += missed

    def as_left(
        self, gradients: Mapping[str, Tensor | None], keep: bool
    ) -> Mapping[str, Tensor | None]:
        """The gradients that an optimizer would read as soon as the step has returned.

        On CUDA an optimizer's kernels are put on the current stream, and wait for nothing that
        other streams still do. So the gradients are copied on that stream before the device is
        synchronised, and compared with what they are afterwards. This takes the memory of one more
        copy of them. ``keep``: copy them on the CPU as well, because another step follows.
        """
        if self.device.type != "cuda":
            return _copies(gradients) if keep else gradients
        copies = _copies(gradients)
        torch.cuda.synchronize(self.device)
        with _disable_current_modes():  # a log of the step's operations has no room for these
            self.changed_later += [
                name for name, copy in copies.items() if not _same_bits(copy, gradients[name])
            ]
        return copies


def _copies(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if one is None else one.detach().clone() for name, one in gradients.items()}


def _same_bits(copy: Tensor | None, now: Tensor | None) -> bool:
    if copy is None or now is None:
        return copy is now
    copy, now = (getattr(one, "to_local", lambda one=one: one)() for one in (copy, now))
    if copy.is_sparse:
        copy, now = copy._values(), now._values()
    same = (copy == now) | ((copy != copy) & (now != now))  # NaN counts as equal to NaN
    return bool(same.all())


# The buffers that a model has after its last step, and the tensors that its modules keep, under
# their names from before it.

MOST_ELEMENTS = 1 << 20
"""Of all of them together; a codebook of 2,048 entries of 256 elements with its averages fits."""


def buffers_left(model: nn.Module, before: Collection[str]) -> dict[str, Tensor]:
    """Copies of the buffers, as long as they are not large. ``before``: their names before the
    step.
    """
    found: dict[str, Tensor] = {}
    left = MOST_ELEMENTS
    for name, one in named_state(model):
        if one.numel() > left:
            continue
        left -= one.numel()
        try:
            with torch.no_grad():
                known = name if name in before else without_wrappers(name)
                found[known] = plain(one.detach()).to("cpu", copy=True)
        except (NotPlain, NotImplementedError, RuntimeError):  # it holds no values of its own
            continue
    return found


# Parameters keep the names that they had before the step, whatever the step wraps or renames.

WRAPPER_SEGMENTS = frozenset(
    {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
)
"""The words that DDP, torch.compile, activation checkpointing and FSDP insert into names."""


class ParameterNames:
    """The names of a model's parameters before its step. A shared parameter has its first name.

    Afterwards ``parameters`` finds the parameters wherever they are now, and ``of_returned`` gives
    their names to what the step returned.
    """

    def __init__(self, model: nn.Module) -> None:
        # No weak references: torch.utils.swap_tensors refuses tensors that have any.
        self._known = dict(model.named_parameters())
        self.shapes = {name: one.shape for name, one in self._known.items()}
        first = {id(one): name for name, one in self._known.items()}
        self._own = {
            name: first[id(one)] for name, one in model.named_parameters(remove_duplicate=False)
        }
        self._modules = {name: weakref.ref(one) for name, one in model.named_modules()}
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameters now, under the names that they had before the step.

        A parameter is recognised by its identity. If the step has replaced it by another, that one
        is recognised by its module, by its name, or else by its place in the order of the model. A
        parameter that the step has added is included if it is trained; its name says so.
        """
        now = dict(original_parameters(model))
        if now.keys() == self._known.keys() and all(
            self._known[name] is parameter for name, parameter in now.items()
        ):
            return now
        names = {id(parameter): name for name, parameter in self._known.items()}
        found = {names[id(one)]: one for one in now.values() if id(one) in names}
        new = {name: one for name, one in now.items() if id(one) not in names}
        for match in (self._by_module, self._by_name, self._by_place):
            free = [name for name in self._known if name not in found]
            for name, own in match(model, new, free).items() if new and free else ():
                if own not in found:
                    found[own] = new.pop(name)
        self._known |= found
        in_order = {name: found[name] for name in self._known if name in found}
        return in_order | {
            f"{name} (added by the step)": one for name, one in new.items() if one.requires_grad
        }

    def _by_module(
        self, model: nn.Module, new: Mapping[str, nn.Parameter], free: Sequence[str]
    ) -> dict[str, str]:
        """Parameters of modules that were part of the model before, wherever these are now."""
        paths = self.modules()
        now = dict(model.named_modules(remove_duplicate=False))
        found = {}
        for name in new:
            path, _, last = name.rpartition(".")
            own = ".".join(filter(None, (paths.get(id(now.get(path)), "?"), last)))
            if own in free:
                found[name] = own
        return found

    def _by_name(
        self, model: nn.Module, new: Mapping[str, nn.Parameter], free: Sequence[str]
    ) -> dict[str, str]:
        return _matched(new, {name: own for name, own in self._own.items() if own in free})

    def _by_place(
        self, model: nn.Module, new: Mapping[str, nn.Parameter], free: Sequence[str]
    ) -> dict[str, str]:
        """Nothing, unless every new parameter has the shape of the one that it stands for."""
        shapes = [self.shapes[name] for name in free]
        same = shapes == [parameter.shape for parameter in new.values()]
        return dict(zip(new, free, strict=True)) if same else {}

    def of_returned(
        self, model: nn.Module, returned: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | None]:
        """The tensors that the step returned, under the model's own names and without its buffers.

        Names that fit no parameter are kept. Raises TypeError if no name fits any, and ValueError
        if a name fits several parameters, or if two different tensors belong to one parameter.
        """
        if returned.keys() == self._known.keys():
            return dict(returned)
        names = self._matched_as_a_whole(model, returned)
        found: dict[str, Tensor | None] = {}
        taken_from: dict[str, str] = {}
        for name, value in returned.items():
            own = names.get(name, name)
            if own in self.buffers:
                continue
            if own in found and not _equal(found[own], value):
                raise ValueError(
                    f"the step returned two different tensors for the parameter {own}: as "
                    f"{taken_from[own]} and as {name}"
                )
            found[own], taken_from[own] = value, name
        if returned and self._known.keys().isdisjoint(found):
            raise no_parameters(returned, self._known)
        return found

    def first_of(self, name: str) -> str:
        """The first name of the parameter that had this name before the step."""
        return self._own.get(name, name)

    def modules(self) -> dict[int, str]:
        """The id of each module that was part of the model before the step -> its name there."""
        modules = ((path, reference()) for path, reference in self._modules.items())
        return {id(module): path for path, module in modules if module is not None}

    def _matched_as_a_whole(self, model: nn.Module, names: Iterable[str]) -> dict[str, str]:
        """Each name -> the model's own name, by the first way that fits all names.

        They are the names before the step, or the names that the model has now, or either of them
        behind what wrappers of the whole model have put in front. If none of this fits all names,
        each name is matched on its own.
        """
        self.parameters(model)  # recognises parameters that the step has replaced
        held = {id(parameter): name for name, parameter in self._known.items()}
        with_buffers = {name: name for name in self.buffers}
        before = with_buffers | self._own
        after = with_buffers | {
            name: held[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in held
        }
        shorter = {name: name for name in names}
        while True:
            for table in (before, after):
                if all(short in table for short in shorter.values()):
                    return {name: table[short] for name, short in shorter.items()}
            if not all(short.partition(".")[0] in WRAPPER_SEGMENTS for short in shorter.values()):
                return _matched(names, after | before)
            shorter = {name: short.partition(".")[2] for name, short in shorter.items()}


def _matched(names: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    """Each name -> the model's own name in ``table``, first of those that stand in it as they
    are, then of those that do so without the segments of wrappers.

    Raises ValueError if a name fits several.
    """
    found = {name: table[name] for name in names if name in table}
    by_bare_name: dict[str, set[str]] = {}
    for name, own in table.items():
        by_bare_name.setdefault(without_wrappers(name), set()).add(own)
    for name in names:
        fitting = set() if name in table else by_bare_name.get(without_wrappers(name), set())
        if len(fitting) > 1:
            raise ValueError(
                f"the name {name} could be {' or '.join(sorted(fitting, key=len))}: return "
                "tensors by the names that the model itself gives its parameters"
            )
        found.update((name, own) for own in fitting)
    return found


def without_wrappers(name: str) -> str:
    """The name without what wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or digest({"": one}) == digest({"": other})
