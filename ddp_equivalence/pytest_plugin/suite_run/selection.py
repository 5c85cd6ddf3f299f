"""What ``ddp-equivalence run`` and ``record`` leave out unless they are called with ``--all``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run import SELECTION
from ddp_equivalence.pytest_plugin.suite_run.pairwise import covering
from ddp_equivalence.report.line import Line
from ddp_equivalence.strategies.trial import Trial

LIKE_THE_CONTROLLER = "ddp_equivalence_selects"
"""The key of xdist's ``workerinput`` under which a worker finds whether it selects."""

COUNTS = "ddp_equivalence_selected"
"""The key of xdist's ``workeroutput`` under which a worker leaves the counts."""

TIMES_OF_A_DIFFERENCE = 3
"""Of the time of a trial that is the same: about as many runs of its step."""


@dataclass(frozen=True)
class Selected:
    """How many tests are run, of those that this machine can run."""

    tests: int
    of: int

    @property
    def text(self) -> str:
        """The counts, and how to run the rest."""
        return f"selected {self.tests:,} of {self.of:,} (pairwise); --all runs the rest"


class PairwiseSelection:
    """Registered in every process of a run with ``--ddp-pairwise``.

    ``selected``: None until tests are collected, and where the user has chosen tests: all of those
    run. Tests that will be skipped stay, and are not counted: the closing table lists them.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._selects = (
            not _user_chose(config) if worker_input is None else worker_input[LIKE_THE_CONTROLLER]
        )
        self.selected: Selected | None = None

    @property
    def after(self) -> list[Line]:
        """What ends the closing table."""
        return [] if self.selected is None else [Line(f"Tests: {self.selected.text}")]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[LIKE_THE_CONTROLLER] = self._selects

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        counts = getattr(node, "workeroutput", {}).get(COUNTS)
        if counts is not None:
            self.selected = Selected(*counts)

    @pytest.hookimpl(trylast=True)  # the marks of skipped tests are set by then
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self._selects:
            return
        runs = [item for item in items if item.get_closest_marker("skip") is None]
        left_out = _left_out(runs)
        self.selected = Selected(len(runs) - len(left_out), len(runs))
        if hasattr(self._config, "workeroutput"):
            counts = [self.selected.tests, self.selected.of]
            self._config.workeroutput[COUNTS] = counts
        if left_out:
            self._config.hook.pytest_deselected(items=list(left_out))
            items[:] = [item for item in items if item not in left_out]


def selected(config: pytest.Config) -> Selected | None:
    """What this process has selected; None if nothing was left out."""
    selection = config.pluginmanager.get_plugin(SELECTION)
    return None if selection is None else selection.selected


def _user_chose(config: pytest.Config) -> bool:
    """True if the command line names tests."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    options = ("keyword", "markexpr", "lf")
    return named or any(getattr(config.option, name, None) for name in options)


def cost_of(trial: Trial) -> float:
    """About how long a trial takes, in no unit: it grows with its ranks, and where a strategy is
    known to differ, they run again and are watched.
    """
    return trial.case.ranks.world_size * (TIMES_OF_A_DIFFERENCE if trial.cause else 1)


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests without which every pair of values is still there. Their order does not matter."""
    of_catalogue, of_faults = dict[pytest.Item, dict[str, object]](), {}
    costs = dict[pytest.Item, float]()
    for item in sorted(items, key=lambda one: one.nodeid):
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        trial = item.get_closest_marker("trial")
        if trial is not None and "trial" in parameters:
            *_, lane = trial.args
            of_catalogue[item] = {**parameters["trial"].factors, "lane": lane}
            costs[item] = cost_of(parameters["trial"])
        elif "fault_trial" in parameters:
            of_faults[item] = parameters["fault_trial"].factors
            costs[item] = cost_of(parameters["fault_trial"].trial)
    left_out: set[pytest.Item] = set()
    for tests in (of_catalogue, of_faults):
        chosen = set(covering(list(tests.values()), [costs[item] for item in tests]))
        left_out |= {item for number, item in enumerate(tests) if number not in chosen}
    return left_out
