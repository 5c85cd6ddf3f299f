"""Checks the arguments of ``check`` before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddp_equivalence.case import settings
from ddp_equivalence.case.build import catalogue_loss_of
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import Layout, parse
from ddp_equivalence.case.no_loss import no_loss
from ddp_equivalence.case.random_state import Seeds
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.case.steps import Compare, Steps, step_count
from ddp_equivalence.case.training import Training
from ddp_equivalence.measurement.check_options import (
    CheckOptions,
    check_names,
    deadlines_of,
    seeds_of,
    steps_of,
    training_of,
    truth_of,
)
from ddp_equivalence.measurement.lane_of_case import lane_of
from ddp_equivalence.measurement.repeat import repeating_command
from ddp_equivalence.measurement.step_signature import why_not_a_step
from ddp_equivalence.measurement.work import Step
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.strategy import Strategy

COMPARES = ("gradients", "update")


@dataclass(frozen=True)
class Request:
    """The valid arguments of one ``check``, with the settings of the run filled in.

    ``at_each_step``: what is compared is taken at each step of an optimizer, in a step that trains;
    gradients are those before clipping, or ``after_clipping``. ``read_order``: the examples of the
    batch in the order in which the steps were seen to read them, if that is another one.
    ``explains``: False where a difference is observed, and no cause of it is looked for.
    """

    case: Case
    step: Step | str
    strategy: Strategy | None
    compare: Compare
    training: Training
    seeds: Seeds
    steps: Steps
    lane: Lane
    deadline: float
    collective_deadline: float
    fresh: bool
    in_process: bool
    allow_changes: bool
    second_look: bool
    plant: str
    at_each_step: bool = False
    after_clipping: bool = False
    read_order: tuple[int, ...] = ()
    explains: bool = True

    @property
    def processes(self) -> Layout:
        """The layout of the processes that are started."""
        one_process = self.strategy is not None and self.strategy.one_process
        return parse("1x1") if one_process else self.case.ranks

    @property
    def lr(self) -> float:
        """The learning rate of plain SGD."""
        return self.training.lr

    @property
    def trains(self) -> bool:
        """True if the step is the user's own and trains: it is given all examples at once."""
        return self.strategy is None and (self.compare == "update" or self.at_each_step)

    @property
    def is_the_users_own(self) -> bool:
        """True for a user's step with a model, loss or batch of the user's, and no planted fault.

        The catalogue's steps and models are held to what they promise of each other.
        """
        return self.strategy is None and not self.case.is_catalogue and not self.plant

    @property
    def step_count(self) -> int:
        return step_count(self.steps)

    @property
    def is_cast_to_float64(self) -> bool:
        """True if the user's own step is checked in float64, whatever precision it was built in."""
        return (
            self.strategy is None
            and not self.plant
            and not self.case.exact
            and self.case.dtype is torch.float64
        )


def read_request(case: Case, step: Step | str, options: CheckOptions) -> Request:
    """Check the arguments of ``check`` and fill in the settings of the run.

    Raises BadCase for an argument that cannot be right, TypeError for an unknown option.
    """
    check_names(options)
    compare = options.get("compare", "gradients")
    backend = options.get("backend")
    now = settings.current()
    if not isinstance(case, Case):
        raise _no_case(case, step)
    strategy = _strategy_of(step)
    if compare not in COMPARES:
        raise BadCase("compare", compare, f"one of {', '.join(COMPARES)}")
    training = training_of(options, compare)
    _check_training_of(case, strategy, training, now.plant)
    deadline, collective_deadline = deadlines_of(
        options.get("deadline"), options.get("collective_deadline")
    )
    steps = steps_of(options.get("steps", 1))
    if case.exact and (compare == "update" or steps != 1):
        right = "a check of one step's gradients: with SGD steps the weights leave the integers"
        raise BadCase("exact", True, right)
    lane = lane_of(case, strategy, now.backend if backend is None else backend, now.must_run)
    _check_batch(case, strategy, now.plant)
    return Request(
        case=case,
        step=step,
        strategy=strategy,
        compare=compare,
        training=training,
        seeds=seeds_of(options, own_step=strategy is None),
        steps=steps,
        lane=lane,
        deadline=deadline,
        collective_deadline=collective_deadline,
        fresh=truth_of(options, "fresh_ranks", now.fresh_ranks),
        in_process=truth_of(options, "in_process", now.in_process),
        allow_changes=truth_of(options, "allow_changes", now.allow_changes),
        second_look=now.second_look,
        plant=now.plant,
    )


def _check_training_of(
    case: Case, strategy: Strategy | None, training: Training, plant: str
) -> None:
    """Strategies and planted faults know plain SGD; a case without a loss needs a reference."""
    if strategy is not None and not training.is_plain_sgd:
        right = f"a step of your own: {strategy.name} is compared with plain SGD"
        raise BadCase("step", strategy.name, right)
    if case.loss is no_loss and (training.reference is None or strategy is not None or plant):
        right = "(model, batch) -> scalar tensor; only a check with reference= needs none"
        raise BadCase("loss", None, right)


def _check_batch(case: Case, strategy: Strategy | None, plant: str) -> None:
    """The strategy, or the fault that is planted, must be able to take the batch apart."""
    if strategy is not None and case.shards == OWN:
        right = f"shards dealt to the ranks: {strategy.name} does not choose examples itself"
        raise BadCase("shards", OWN, right)
    if strategy is not None and case.batch_dims is not None:
        right = f"None, or a step of your own: {strategy.name} takes examples along dim 0"
        raise BadCase("batch_dims", case.batch_dims, right)
    if plant and callable(case.batch_dims):
        right = "a dim, or a dict from paths to dims: a planted fault must count a rank's examples"
        raise BadCase("batch_dims", name_of(case.batch_dims), right)
    if strategy is not None and strategy.needs_normalisers:
        catalogue_loss_of(case, needed_by=strategy.name)


def _no_case(given: object, step: object) -> BadCase:
    if isinstance(step, Case):
        return BadCase("case", name_of(given), "a Case: check(case, step), in this order")
    return BadCase("case", given, "a ddp_equivalence.Case")


def _strategy_of(step: object) -> Strategy | None:
    """The strategy of this name, None for a step of the user. Raises BadCase if it is neither."""
    strategy = STRATEGIES.get(step) if isinstance(step, str) else None
    if strategy is None:
        if not callable(step):
            names = ", ".join(STRATEGIES)
            raise BadCase("step", step, f"a function (model, shard, rank), or one of {names}")
        if wrong := why_not_a_step(step):
            raise BadCase("step", name_of(step), wrong)
    return strategy


def repeat_line(request: Request) -> str:
    """The command that repeats the check, or a call of ``check`` if names alone describe the case.

    "" if there is neither.
    """
    if settings.current().repeat:
        return settings.current().repeat
    if not request.case.is_catalogue or not isinstance(request.step, str):
        return repeating_command(request)
    case = request.case
    fields = [f"model={case.model!r}", f"loss={case.loss!r}", f"layout={case.layout!r}"]
    if case.shards != "equal":
        fields.append(f"shards={case.shards!r}")
    if case.dtype is not torch.float64:
        fields.append(f"dtype={case.dtype}")
    if case.seed:
        fields.append(f"seed={case.seed}")
    if case.exact:
        fields.append("exact=True")
    if case.examples is not None:
        fields.append(f"examples={case.examples}")
    more = "" if request.compare == "gradients" else f", compare={request.compare!r}"
    more += "" if request.steps == 1 else f", steps={request.steps!r}"
    more += "" if request.compare == "gradients" and request.steps == 1 else f", lr={request.lr:g}"
    backend = {"gloo_fallback": "auto", "emulated": "auto"}.get(request.lane.name)
    more += "" if backend or request.lane.drives_all_gpus else f", backend={request.lane.name!r}"
    return f"check(Case({', '.join(fields)}), {request.step!r}{more})"
