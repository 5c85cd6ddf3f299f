"""Checks the arguments of ``check`` before anything runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TypedDict

import torch

from ddp_equivalence.case import settings
from ddp_equivalence.case.build import catalogue_loss_of
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import Layout, parse
from ddp_equivalence.case.numbers import is_number, whole_number, whole_numbers
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.case.steps import Compare, Steps, step_count
from ddp_equivalence.measurement.lane_of_case import lane_of
from ddp_equivalence.measurement.repeat import repeating_command
from ddp_equivalence.measurement.step_signature import why_not_a_step
from ddp_equivalence.measurement.work import Step
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.strategy import Strategy

COMPARES = ("gradients", "update")

LEAST_SECONDS = 1.0
"""A case gets at least this many seconds, even if the time of the run is over."""


@dataclass(frozen=True)
class Request:
    """The valid arguments of one ``check``, with the settings of the run filled in."""

    case: Case
    step: Step | str
    strategy: Strategy | None
    compare: Compare
    lr: float
    steps: Steps
    lane: Lane
    deadline: float
    collective_deadline: float
    fresh: bool
    in_process: bool
    allow_changes: bool
    second_look: bool
    plant: str

    @property
    def processes(self) -> Layout:
        """The layout of the processes that are started."""
        one_process = self.strategy is not None and self.strategy.one_process
        return parse("1x1") if one_process else self.case.ranks

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


class CheckOptions(TypedDict, total=False):
    """The options of ``check``, which every function that makes a check takes as well.

    ``compare``: "gradients" calls the step once for every big batch and compares the gradients of
    each. "update" compares how far the weights have moved. A step of your own is then called once,
    with the examples of all big batches joined. It leaves the trained weights in the model, or
    returns them by name. The reference takes one plain SGD step, with the learning rate ``lr``, for
    every big batch.
    ``steps``: into how many big batches, one for each step, the batch is divided; or a tuple with
    the number of examples of each. ``backend``: "auto" (NCCL if there is a GPU for each rank, gloo
    on the CPU otherwise), "gloo", "gloo_cuda", "nccl", "nccl2" or "nccl-legacy". ``deadline``:
    seconds for the ranks' work. ``collective_deadline``: seconds for one collective (half of
    ``deadline`` by default).
    ``fresh_ranks``: start new processes for this check instead of using warm ones.
    ``in_process``: rank 0 is the calling process, so that a debugger works in the step.
    ``allow_changes``: the step may change its process (seed, environment, default dtype, threads
    and processes left running) without failing the check; the changes are undone.

    An option that is None, or absent, takes the setting of the run.
    """

    compare: Compare
    lr: float
    steps: Steps
    backend: str | None
    deadline: float | None
    collective_deadline: float | None
    fresh_ranks: bool | None
    in_process: bool | None
    allow_changes: bool | None


def read_request(case: Case, step: Step | str, options: CheckOptions) -> Request:
    """Check the arguments of ``check`` and fill in the settings of the run.

    Raises BadCase for an argument that cannot be right, TypeError for an unknown option.
    """
    _check_names(options)
    compare, lr = options.get("compare", "gradients"), options.get("lr", 0.1)
    backend = options.get("backend")
    now = settings.current()
    if not isinstance(case, Case):
        raise _no_case(case, step)
    strategy = _strategy_of(step)
    if compare not in COMPARES:
        raise BadCase("compare", compare, f"one of {', '.join(COMPARES)}")
    if not is_number(lr) or not 0 < lr < float("inf"):
        raise BadCase("lr", lr, "a learning rate above 0")
    deadline, collective_deadline = _deadlines(
        options.get("deadline"), options.get("collective_deadline")
    )
    steps = _steps(options.get("steps", 1))
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
        lr=float(lr),
        steps=steps,
        lane=lane,
        deadline=deadline,
        collective_deadline=collective_deadline,
        fresh=_truth(options, "fresh_ranks", now.fresh_ranks),
        in_process=_truth(options, "in_process", now.in_process),
        allow_changes=_truth(options, "allow_changes", now.allow_changes),
        second_look=now.second_look,
        plant=now.plant,
    )


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


def _check_names(options: CheckOptions) -> None:
    """Raises TypeError for an option that ``check`` does not take."""
    if unknown := options.keys() - CheckOptions.__annotations__.keys():
        name, takes = min(unknown), ", ".join(CheckOptions.__annotations__)
        where = ""
        if name in {field.name for field in fields(Case)}:
            where = f"; {name} is a field of the case: Case({name}=...)"
        raise TypeError(f"check() got an unexpected option {name!r}; it takes {takes}{where}")


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


def _truth(options: CheckOptions, name: str, setting: bool) -> bool:
    option = options.get(name)
    if option is not None and not isinstance(option, bool):
        raise BadCase(name, option, "True or False")
    return setting if option is None else option


def _deadlines(case: float | None, collective: float | None) -> tuple[float, float]:
    """Seconds for the case and for one collective.

    The time for a collective is below that of the case. The case gets no more time than the run has
    left, but at least ``LEAST_SECONDS``.
    """
    now = settings.current()
    case = now.deadline if case is None else case
    if not is_number(case) or not 0 < case < float("inf"):
        raise BadCase("deadline", case, "a number of seconds above 0")
    given = collective is not None
    collective = now.collective_deadline if collective is None else collective
    if collective is not None and not is_number(collective):
        raise BadCase("collective_deadline", collective, "a number of seconds above 0")
    if collective is None or (not given and collective >= case):
        collective = case / 2
    if not 0 < collective < case:
        right = f"a number of seconds above 0 and below the deadline of the case ({case:g})"
        raise BadCase("collective_deadline", collective, right)
    if now.run_until is not None:
        case = min(case, max(LEAST_SECONDS, now.run_until - time.monotonic()))
    return float(case), float(collective)


def _steps(steps: object) -> Steps:
    number, sizes = whole_number(steps), whole_numbers(steps)
    right = "at least 1 big batch, or a tuple with the number of examples of each"
    if sizes is not None and not isinstance(steps, tuple):
        raise BadCase("steps", steps, f"at least 1 big batch, or the tuple {sizes}")
    if number is not None and number >= 1:
        return number
    if sizes is not None and min(sizes) >= 1:
        return sizes
    raise BadCase("steps", steps, right)


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
    more += (
        ""
        if backend or request.lane.name == "data_parallel"
        else f", backend={request.lane.name!r}"
    )
    return f"check(Case({', '.join(fields)}), {request.step!r}{more})"
