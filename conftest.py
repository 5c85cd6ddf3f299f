"""Give tests with the argument ``trial`` the catalogue's trials, each on its lane.

What a machine lacks is no fault of it: a test of the suite that cannot run there is skipped, and
the closing table lists it as NOT RUN. A user's own test is not: its author has asked for that lane.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from ddp_equivalence.case import settings
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.diagnosis.own_errors import own_errors_raised
from ddp_equivalence.measurement.request import lane_of
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import CannotRunHere, Lane
from ddp_equivalence.ranks.server import start_early
from ddp_equivalence.strategies import STRATEGIES, catalogue

pytest_plugins = ("ddp_equivalence.pytest_plugin",)


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of ranks early: it imports torch while pytest collects the tests.

    Under xdist every worker starts its own server, and the controlling process needs none.
    """
    if config.getoption("--ddp-plan"):
        return  # no test will run
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        start_early()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a marked test its trials.

    ``@pytest.mark.promise_of("ddp_mean")`` gives it every trial on which the promise of ddp_mean
    holds. ``@pytest.mark.known_differences_of("ddp_mean")`` gives it all other trials of ddp_mean.
    """
    for marker in metafunc.definition.iter_markers("promise_of"):
        trials = _on_their_lanes(metafunc.config, marker.args[0])
        _parametrize(metafunc, [trial for trial in trials if trial.cause is None])
    for marker in metafunc.definition.iter_markers("known_differences_of"):
        trials = _on_their_lanes(metafunc.config, marker.args[0])
        _parametrize(metafunc, [trial for trial in trials if trial.cause is not None])


def _on_their_lanes(config: pytest.Config, strategy: str) -> Iterator[catalogue.Trial]:
    """All trials of the strategy. Those with dropout know whether their ranks compute on GPUs."""
    for trial in catalogue.trials(strategy):
        on_gpu = False
        if MODELS[str(trial.case.model)].draws_random_numbers:
            with suppress(CannotRunHere):
                on_gpu = _lane_of(config, trial).device_type != "cpu"
        yield replace(trial, on_gpu=on_gpu)


def _parametrize(metafunc: pytest.Metafunc, trials: list[catalogue.Trial]) -> None:
    metafunc.parametrize("trial", [_with_lane(metafunc.config, trial) for trial in trials])


def _with_lane(config: pytest.Config, trial: catalogue.Trial) -> object:
    """The trial as a test parameter; its id and marks name its lane, or it is skipped."""
    reason = ""
    try:
        lane = _lane_of(config, trial).name
    except CannotRunHere as error:
        lane, reason = error.lane, error.reason
    if lane == "gloo_cuda":  # for sparse gradients, whatever the backend of the run
        trial = replace(trial, backend=lane)
    marks = [
        getattr(pytest.mark, "nccl" if lane in NCCL_BACKENDS else lane),
        pytest.mark.trial(trial.strategy, trial.case.layout, lane),
    ]
    if reason:
        marks.append(pytest.mark.skip(reason=reason))
    return pytest.param(trial, id=f"{trial}-{lane}", marks=marks)


def _lane_of(config: pytest.Config, trial: catalogue.Trial) -> Lane:
    """The lane of the trial. Raises CannotRunHere if this machine cannot run it there."""
    backend = trial.backend or config.getoption("--ddp-backend")
    if backend in (*NCCL_BACKENDS, NCCL_SHARED) and MODELS[str(trial.case.model)].sparse_gradients:
        backend = "gloo_cuda"
    must_run = config.getoption("--must-run")
    return lane_of(trial.case, STRATEGIES[trial.strategy], backend, must_run)


@pytest.fixture(scope="session", autouse=True)
def _own_errors_fail_tests() -> Iterator[None]:
    with own_errors_raised():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip the test if this machine, or this torch, lacks what it needs, and say so in the table.

    A lane whose ranks never start fails in one test, and is skipped from then on.
    """
    try:
        with settings.using(settings.replaced(give_up_lanes=True)):
            return (yield)
    except CannotRunHere as error:
        if not any(item.iter_markers("trial")) and not any(item.iter_markers("self_check")):
            item.add_marker(pytest.mark.trial(error.subject, error.layout, error.lane))
        pytest.skip(error.reason)
    except RankFailed as error:
        for marker in item.iter_markers("needs_kernel"):
            for end in error.ends:
                if re.search(marker.args[0], end.what):
                    pytest.skip(f"torch {torch.__version__} has no such kernel: {end.what}")
        raise
