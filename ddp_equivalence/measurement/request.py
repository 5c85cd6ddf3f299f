"""Checks the arguments of check before anything runs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TypedDict

import torch

from ddp_equivalence.case import settings
from ddp_equivalence.case.build import catalogue_loss_of
from ddp_equivalence.case.case import Case, name_of, no_loss
from ddp_equivalence.case.errors import BadCase, is_number, one_of, whole_number, whole_numbers
from ddp_equivalence.case.layouts import MAX_PROCESSES, Layout, parse
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import SEEDS, Seeds
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.case.training import (
    Clip,
    Compare,
    MakeOptimizer,
    OwnReference,
    Steps,
    Training,
    check_training,
    step_count,
)
from ddp_equivalence.measurement.work import Step, why_not_a_step
from ddp_equivalence.ranks.backend_names import NCCL_SHARED
from ddp_equivalence.ranks.importable import belongs_to_user
from ddp_equivalence.ranks.lanes import (
    CannotRunHere,
    Lane,
    choose,
    missing,
    must_share,
    replicas_lane,
    shared_lane,
)
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
    ``by_steps``: a step that trains is judged at each step of an optimizer as well.
    """

    case: Case
    step: Step | str
    lane: Lane
    deadline: float
    collective_deadline: float
    strategy: Strategy | None = None
    compare: Compare = "gradients"
    training: Training = field(default_factory=Training)
    seeds: Seeds = "alike"
    steps: Steps = 1
    fresh: bool = False
    in_process: bool = False
    allow_changes: bool = False
    second_look: bool = False
    plant: str = ""
    at_each_step: bool = False
    after_clipping: bool = False
    read_order: tuple[int, ...] = ()
    explains: bool = True
    by_steps: bool = True

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
    def judges_gradients_at_each_step(self) -> bool:
        """True if those gradients are compared with which an optimizer steps on a rank."""
        return self.at_each_step and self.compare == "gradients"

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
    if (ranks := case.ranks.world_size) > MAX_PROCESSES:
        right = f"at most {MAX_PROCESSES} ranks, not {ranks}: each is a process on this machine; "
        right += "ddp-equivalence simulate tries up to 4,096 in one process"
        raise BadCase("layout", case.layout, right)
    if compare not in COMPARES:
        raise BadCase("compare", compare, one_of(COMPARES, compare))
    training = training_of(options, compare)
    _check_training_of(case, strategy, training, now.plant)
    deadline, collective_deadline = deadlines_of(
        options.get("deadline"), options.get("collective_deadline")
    )
    steps = steps_of(options.get("steps", 1))
    if case.exact and (compare == "update" or steps != 1):
        right = "left out, or used with compare='gradients': SGD steps leave the integers"
        raise BadCase("exact", True, right)
    lane = lane_of(case, strategy, now.backend if backend is None else backend, now.must_run)
    check_batch(case, strategy, now.plant)
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
        right = "a function (model, batch) -> scalar tensor; only with reference= none is needed"
        raise BadCase("loss", None, right)


def check_batch(case: Case, strategy: Strategy | None, plant: str) -> None:
    """The strategy, or the fault that is planted, must be able to take the batch apart."""
    if strategy is not None and strategy.needs_even_nodes and not case.ranks.has_even_nodes:
        right = (
            f"nodes with equally many ranks, such as '2x2': {strategy.name} makes a mesh of them"
        )
        raise BadCase("layout", case.layout, right)
    if strategy is not None and case.shards == OWN:
        right = f"such as 'equal': {strategy.name} does not choose examples itself"
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
            right = f"a function (model, shard, rank), or {one_of(STRATEGIES, step)}"
            raise BadCase("step", step, right)
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


# The options of ``check``, and the checks of single ones.

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
        raise BadCase("lr", lr, f"left out: the learning rate is that of {given}=")
    return training


def seeds_of(options: CheckOptions, own_step: bool) -> Seeds:
    """How the ranks are seeded. Strategies of the catalogue are all seeded alike."""
    seeds = options.get("seeds")
    if seeds is not None and seeds not in SEEDS:
        raise BadCase("seeds", seeds, one_of(SEEDS, seeds))
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


# Chooses the lane on which a case runs, or says why this machine cannot run it there.


def lane_of(case: Case, strategy: Strategy | None, backend: str, must_run: Sequence[str]) -> Lane:
    """The lane on which a case runs; ``strategy`` is None for a step of the user.

    ``must_run``: the lanes that ``--must-run`` requires. Raises CannotRunHere if this machine
    cannot run the case on the lane that is asked for.
    """
    if strategy is not None and strategy.one_process:
        return _lane_of_one_process(case, strategy)
    if strategy is not None and strategy.gpus_per_rank > 1:
        return _lane_of_several_gpus(case, strategy)
    model = MODELS.get(case.model) if isinstance(case.model, str) else None
    lane = choose(
        case.ranks,
        backend,
        sparse_gradients=model is not None and model.sparse_gradients,
        may_fall_back="nccl" not in must_run and NCCL_SHARED not in must_run,
    )
    if strategy is not None and strategy.lane is not None and lane.device_type == "cpu":
        reason = lane.reason or "needs CUDA devices, and gloo computes on the CPU"
        raise _cannot_run(strategy.lane, case, strategy, reason)
    return lane


def _lane_of_one_process(case: Case, strategy: Strategy) -> Lane:
    """The lane of a strategy whose single process drives all replicas.

    The process needs no backend, but perhaps several devices, or one for several replicas.
    """
    if case.ranks.nodes > 1:
        right = (
            f"one node, such as '1x{case.ranks.world_size}': {strategy.name} runs in one process"
        )
        raise BadCase("layout", case.layout, right)
    if strategy.lane is None:
        return Lane("emulated", "gloo", "cpu", "one process on the CPU")
    lane = replicas_lane(case.ranks.world_size)
    _require(lane.name, case, strategy)
    return lane


def _lane_of_several_gpus(case: Case, strategy: Strategy) -> Lane:
    """The lane of a strategy whose ranks drive several GPUs each, or else one several times."""
    each = strategy.gpus_per_rank
    if must_share(case.ranks.world_size * each):
        _require(NCCL_SHARED, case, strategy)
        return shared_lane(case.ranks, f", with {each} replicas on one device each")
    _require("nccl", case, strategy)
    return Lane("nccl", "nccl", "cuda", gpus_per_rank=each)


def _require(lane: str, case: Case, strategy: Strategy) -> None:
    """Raises CannotRunHere if this machine lacks the lane for the case."""
    reason = missing(lane, case.ranks.world_size, strategy.gpus_per_rank)
    if reason is not None:
        raise _cannot_run(lane, case, strategy, reason)


def _cannot_run(lane: str, case: Case, strategy: Strategy, reason: str) -> CannotRunHere:
    right = f"one that this machine can run: {strategy.name} {reason}"
    return CannotRunHere("layout", case.layout, right, lane, case.layout, reason)


@contextmanager
def subject_named(step: object) -> Iterator[None]:
    """Tell a CannotRunHere that leaves the block which step was to run."""
    try:
        yield
    except CannotRunHere as error:
        error.subject = name_of(step)
        raise


# The command that repeats a check of a user's own step.


def repeating_command(request: Request) -> str:
    """The command that finds this case and step in their file, or runs the user's script again.

    "" if there is neither a file nor a script.
    """
    step = request.step
    module = sys.modules.get(getattr(step, "__module__", None) or "")
    name, file = getattr(step, "__name__", ""), getattr(module, "__file__", None)
    is_found = getattr(module, name, None) is step and getattr(module, "case", None) is request.case
    if name and file and is_found and getattr(module, "__name__", "") != "__main__":
        return f"ddp-equivalence check {_of_file(file, name, request)}"
    return _script()


def _of_file(file: str, name: str, request: Request) -> str:
    words = [f"{_short_path(file)}:{name}"]
    if request.compare != "gradients":
        words += ["--compare", request.compare]
    if isinstance(request.steps, int) and request.steps != 1:
        words += ["--steps", str(request.steps)]
    if request.compare == "update" and request.lr != 0.1:
        words += ["--lr", f"{request.lr:g}"]
    return shlex.join(words)


def _script() -> str:
    """The user's script that is running; "" in a notebook, and under a program of others."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not file or not belongs_to_user(file):
        return ""
    program = [_short_path(file)] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(["python", *program, *sys.argv[1:]])


def _short_path(file: str) -> str:
    """From the working folder, if the file lies below it."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith(os.pardir) else path
