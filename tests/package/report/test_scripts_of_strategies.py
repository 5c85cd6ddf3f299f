"""A strategy of the catalogue is exported with its model and loss as files of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_equivalence import Case
from ddp_equivalence.case.training import Compare
from ddp_equivalence.report.script import export
from ddp_equivalence.strategies import STRATEGIES, catalogue
from tests.package.report.exported_scripts import assert_same_big_batch, by_itself, torchrun


@pytest.mark.parametrize(("strategy", "compare"), [("ddp_mean", "gradients"), ("zero", "update")])
def test_where_a_strategy_is_right_the_script_ends_with_same(
    strategy: str, compare: Compare, tmp_path: Path
) -> None:
    case = Case(model="mlp", loss="mse_mean", layout="1x2")
    path = export(case, strategy, tmp_path, compare=compare, steps=2)
    code, shown = torchrun(path, ranks=2)
    assert code == 0, shown
    count = 4 if compare == "update" else 8
    assert f"same: {count} of {count} parameters agree with one big batch" in shown


@pytest.mark.parametrize(("backend", "gpus", "needed"), [("gloo_cuda", 0, 1), ("nccl", 1, 2)])
def test_a_script_says_how_many_gpus_it_needs(
    backend: str, gpus: int, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = by_itself(
        export(Case(model="mlp", loss="mse_mean", layout="1x2"), "ddp_mean", tmp_path)
    )
    names["BACKEND"] = backend
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=f"{backend} and needs {needed} GPUs, found {gpus}"):
        names["join_process_group"]()


def _a_few(strategy: str) -> list[catalogue.Trial]:
    """The first case of every kind of script that the strategy has."""
    kinds: dict[tuple[object, ...], catalogue.Trial] = {}
    for trial in catalogue.trials(strategy):
        padded = trial.case.shards == "no_valid_token"
        random = trial.case.model == "dropout"
        kind = (trial.compare, trial.steps != 1, trial.case.exact, padded, random)
        kinds.setdefault(kind, trial)
    return list(kinds.values())


@pytest.mark.parametrize("strategy", [n for n, one in STRATEGIES.items() if one.lane is None])
def test_every_strategy_has_a_script_with_the_same_big_batch(strategy: str, tmp_path: Path) -> None:
    for trial in _a_few(strategy):
        options: dict[str, Any] = {"compare": trial.compare, "steps": trial.steps}
        path = export(trial.case, strategy, tmp_path, name="script", **options)
        assert_same_big_batch(by_itself(path), trial.case, **options)
