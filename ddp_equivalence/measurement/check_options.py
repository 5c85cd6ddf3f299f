"""The options of ``check``, and the checks of single ones."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import TypedDict

from ddp_equivalence.case import settings
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.numbers import is_number, whole_number, whole_numbers
from ddp_equivalence.case.random_state import SEEDS, Seeds
from ddp_equivalence.case.steps import Compare, Steps
from ddp_equivalence.case.training import (
    Clip,
    MakeOptimizer,
    OwnReference,
    Training,
    check_training,
)

LEAST_SECONDS = 1.0
"""A case gets at least this many seconds, even if the time of the run is over."""


class CheckOptions(TypedDict, total=False):
    """The options of ``check``, which every function that makes a check takes as well.

    ``compare``: "gradients" calls the step once for every big batch and compares the gradients of
    each. "update" compares how far the weights have moved. A step of your own is then called once,
    with the examples of all big batches joined. It leaves the trained weights in the model, or
    returns them by name. The reference takes one plain SGD step, with the learning rate ``lr``, for
    every big batch.
    ``optimizer``: what the reference steps with instead, made by a function of the parameters (or
    of the model, if its argument is called ``model``): an optimizer, or a list of optimizers and
    schedulers. ``clip``: the norm that it clips all gradients to before, or a function of the
    parameters that clips them. ``reference``: a function (model, batch) that trains one whole step
    in one process, instead of all this; or a function (model) that returns such a function of the
    batch. Each of the three needs ``compare="update"``.
    ``seeds``: "apart" (the default for a step of your own) gives each rank random numbers of its
    own, as processes have that set no seed. "alike" seeds all ranks as the reference is.
    ``steps``: into how many big batches, one for each step, the batch is divided; or a tuple with
    the number of examples of each. ``backend``: "auto" (NCCL with a GPU for each rank, or whose
    ranks share the GPUs that there are; gloo on the CPU if there is none), "gloo", "gloo_cuda",
    "nccl", "nccl_shared", "nccl2" or "nccl-legacy". ``deadline``: seconds for the ranks' work.
    ``collective_deadline``: seconds for one collective (half of ``deadline`` by default).
    ``fresh_ranks``: start new processes for this check instead of using warm ones.
    ``in_process``: rank 0 is the calling process, so that a debugger works in the step.
    ``allow_changes``: the step may change its process (seed, environment, default dtype, threads
    and processes left running) without failing the check; the changes are undone.

    An option that is None, or absent, takes the setting of the run.
    """

    compare: Compare
    lr: float
    optimizer: MakeOptimizer | None
    clip: Clip | None
    reference: OwnReference | None
    seeds: Seeds | None
    steps: Steps
    backend: str | None
    deadline: float | None
    collective_deadline: float | None
    fresh_ranks: bool | None
    in_process: bool | None
    allow_changes: bool | None


def training_of(options: CheckOptions, compare: Compare) -> Training:
    """How the reference trains. Raises BadCase if that cannot be right."""
    lr = options.get("lr", 0.1)
    if not is_number(lr) or not 0 < lr < float("inf"):
        raise BadCase("lr", lr, "a learning rate above 0")
    training = Training(
        float(lr), options.get("optimizer"), options.get("clip"), options.get("reference")
    )
    check_training(training, compare)
    if "lr" in options and (training.optimizer or training.reference):
        given = "optimizer" if training.optimizer else "reference"
        raise BadCase("lr", lr, f"none: the learning rate is that of {given}=")
    return training


def seeds_of(options: CheckOptions, own_step: bool) -> Seeds:
    """How the ranks are seeded. Strategies of the catalogue are all seeded alike."""
    seeds = options.get("seeds")
    if seeds is not None and seeds not in SEEDS:
        raise BadCase("seeds", seeds, f"one of {', '.join(SEEDS)}")
    return seeds or ("apart" if own_step else "alike")


def check_names(options: CheckOptions) -> None:
    """Raises TypeError for an option that ``check`` does not take."""
    if unknown := options.keys() - CheckOptions.__annotations__.keys():
        name, takes = min(unknown), ", ".join(CheckOptions.__annotations__)
        where = ""
        if name in {field.name for field in fields(Case)}:
            where = f"; {name} is a field of the case: Case({name}=...)"
        raise TypeError(f"check() got an unexpected option {name!r}; it takes {takes}{where}")


def truth_of(options: CheckOptions, name: str, setting: bool) -> bool:
    """The option of this name, or the setting. Raises BadCase unless it is True or False."""
    option = options.get(name)
    if option is not None and not isinstance(option, bool):
        raise BadCase(name, option, "True or False")
    return setting if option is None else option


def deadlines_of(case: float | None, collective: float | None) -> tuple[float, float]:
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


def steps_of(steps: object) -> Steps:
    """The steps as they are given. Raises BadCase for anything else than numbers of examples."""
    number, sizes = whole_number(steps), whole_numbers(steps)
    right = "at least 1 big batch, or a tuple with the number of examples of each"
    if sizes is not None and not isinstance(steps, tuple):
        raise BadCase("steps", steps, f"at least 1 big batch, or the tuple {sizes}")
    if number is not None and number >= 1:
        return number
    if sizes is not None and min(sizes) >= 1:
        return sizes
    raise BadCase("steps", steps, right)
