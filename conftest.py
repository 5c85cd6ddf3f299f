"""Give tests with the argument ``trial`` the catalogue's trials, each on its lane."""

from __future__ import annotations

import pytest

from ddp_equivalence.case.models import MODELS
from ddp_equivalence.ranks import lanes
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
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
        _parametrize(metafunc, catalogue.cases(promise_of=marker.args[0]))
    for marker in metafunc.definition.iter_markers("known_differences_of"):
        _parametrize(metafunc, catalogue.known_differences(of=marker.args[0]))


def _parametrize(metafunc: pytest.Metafunc, trials: tuple[catalogue.Trial, ...]) -> None:
    metafunc.parametrize("trial", [_with_lane(metafunc.config, trial) for trial in trials])


def _with_lane(config: pytest.Config, trial: catalogue.Trial) -> object:
    """The trial as a test parameter; its id and marks name its lane, or it is skipped."""
    lane, reason = _lane_of(config, trial)
    marks = [
        getattr(pytest.mark, "nccl" if lane in NCCL_BACKENDS else lane),
        pytest.mark.trial(trial.strategy, trial.case.layout, lane),
    ]
    if reason:
        marks.append(pytest.mark.skip(reason=reason))
    return pytest.param(trial, id=f"{trial}-{lane}", marks=marks)


def _lane_of(config: pytest.Config, trial: catalogue.Trial) -> tuple[str, str]:
    """The lane of the trial, and the reason why the trial cannot run on it ("" if it can)."""
    strategy, layout = STRATEGIES[trial.strategy], trial.case.ranks
    must_run = config.getoption("--must-run")
    if strategy.lane is not None:
        return strategy.lane, lanes.missing(strategy.lane, layout.world_size) or ""
    if strategy.one_process:
        return "emulated", ""
    backend = trial.backend or config.getoption("--ddp-backend")
    reason = lanes.missing(backend, layout.world_size) if backend != "auto" else None
    if reason:
        return backend, reason
    lane = lanes.choose(layout, backend)
    if lane.backend in NCCL_BACKENDS and MODELS[str(trial.case.model)].sparse_gradients:
        return lane.name, "NCCL cannot all-reduce sparse gradients"
    if lane.name == "gloo_fallback" and "nccl" in must_run:
        return "nccl", f"{lane.reason}; --must-run nccl allows no other"
    return lane.name, ""
