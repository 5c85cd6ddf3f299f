"""The catalogue has every model, loss, layout and kind of shards, and drops no case in silence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_equivalence import BadCase
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.pytest_plugin.suite_run import covering
from ddp_equivalence.ranks.backend_names import LANES
from ddp_equivalence.strategies import STRATEGIES, catalogue

TESTS = Path(__file__).parents[2]
PACKAGE = TESTS.parent / "ddp_equivalence"
EVERYTHING = [trial for name in STRATEGIES for trial in catalogue.trials(name)]


def _marked(folder: str, marker: str) -> list[str]:
    texts = [path.read_text() for path in sorted((TESTS / folder).glob("test_*.py"))]
    return [name for text in texts for name in re.findall(rf'{marker}\("(\w+)"\)', text)]


def test_equivalence_and_difference_each_have_a_test_of_every_strategy() -> None:
    kept = _marked("equivalence", "promise_of")
    broken = _marked("difference", "known_differences_of")
    assert sorted(kept) == sorted(STRATEGIES)
    assert sorted(broken) == sorted(STRATEGIES)


def test_at_least_four_hundred_cases_are_promised_to_be_the_big_batch() -> None:
    without_gpu = [
        trial
        for name, strategy in STRATEGIES.items()
        for trial in catalogue.trials(name)
        if trial.cause is None and strategy.lane is None and trial.backend is None
    ]
    assert len(without_gpu) >= 400


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        ("model", set(MODELS)),
        ("loss", set(LOSSES)),
        ("layout", set(catalogue.LAYOUTS)),
        ("shards", {"equal", *catalogue.SHARDS}),
        ("dtype_name", {"float64", "float32", "bfloat16", "float64-exact", "float32-exact"}),
    ],
)
def test_every_entry_is_in_a_trial_that_keeps_its_promise(field: str, entries: set[str]) -> None:
    kept = [trial for trial in EVERYTHING if trial.cause is None]
    assert entries <= {getattr(trial.case, field) for trial in kept}


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_has_promises_and_states_its_promise(strategy: str) -> None:
    keeps = {trial.cause is None for trial in catalogue.trials(strategy)}
    assert keeps == {True, False}
    assert STRATEGIES[strategy].promise.endswith(".")


def test_a_strategy_with_the_rule_of_another_has_this_very_rule() -> None:
    ways = [one for one in STRATEGIES.values() if one.has_the_rule_of]
    assert len(ways) >= 5
    for one in ways:
        assert one.cause_of_difference is STRATEGIES[one.has_the_rule_of].cause_of_difference


def test_a_selection_tries_less_of_a_strategy_with_the_rule_of_another() -> None:
    """Yet its promise, each known difference and an update."""
    chosen = [EVERYTHING[one] for one in covering([trial.factors for trial in EVERYTHING])]
    for name, strategy in STRATEGIES.items():
        own = [trial for trial in chosen if trial.strategy == name]
        every = [trial for trial in EVERYTHING if trial.strategy == name]
        for field in ("cause", "compare"):
            assert {getattr(one, field) for one in own} == {getattr(one, field) for one in every}
        if strategy.has_the_rule_of:
            assert len(own) <= len({(one.cause, one.compare) for one in every})


def test_every_known_difference_has_a_name_that_a_diagnosis_knows() -> None:
    known = {hypothesis.name for hypothesis in HYPOTHESES}
    assert {trial.cause for trial in EVERYTHING} - {None} <= known


def test_a_loss_that_couples_examples_is_promised_only_where_it_sees_all_of_them() -> None:
    coupled = [trial for trial in EVERYTHING if LOSSES[str(trial.case.loss)].batch_coupled]
    promised = {trial.strategy for trial in coupled if trial.cause is None}
    assert {trial.strategy for trial in coupled} == set(STRATEGIES)
    assert promised == {"data_parallel", "emulated_data_parallel", "ddp_gathered"}


@pytest.mark.parametrize("module", ["strategies/catalogue", "measurement/request", "faults/trials"])
@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(LANES)))
def test_code_for_all_strategies_names_none_of_them(strategy: str, module: str) -> None:
    """A new strategy is one file and one line: it says in its own fields what others must know.

    The name "data_parallel" is left out, since it is the name of a lane as well.
    """
    assert f'"{strategy}"' not in (PACKAGE / f"{module}.py").read_text()


def test_test_ids_are_unique_within_a_strategy() -> None:
    for name in STRATEGIES:
        ids = [f"{trial}-{trial.backend}" for trial in catalogue.trials(name)]
        assert len(ids) == len(set(ids))


def test_the_catalogue_has_one_order() -> None:
    """Xdist needs the same order in every worker, whatever its hashes."""
    program = (
        "from ddp_equivalence.strategies import catalogue;"
        "print(*catalogue.trials('hybrid'), sep='\\n')"
    )
    printed = []
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS.parent)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=dict(os.environ) | environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        printed.append(done.stdout.splitlines())
    assert printed[0] == [str(trial) for trial in catalogue.trials("hybrid")]
    assert printed[0] == printed[1]


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(BadCase, match="one of data_parallel, emulated_data_parallel"):
        catalogue.trials("ddp_men")
