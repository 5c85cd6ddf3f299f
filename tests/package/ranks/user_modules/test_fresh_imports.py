"""What an import alone gives is no change; what cannot be sent is refused by name."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence import BadCase, check
from ddp_equivalence.ranks.user_modules import changes_in
from tests.package.own_cases import own_case
from tests.package.ranks import many_kinds
from tests.package.ranks.user_modules.training_module import SAME, SUMMED, TRAIN, outcome, step_with


def test_a_module_that_was_edited_and_reloaded_is_judged_as_it_is_now(folder: Path) -> None:
    file = folder / "edited.py"
    file.write_text(TRAIN)
    edited: Any = importlib.import_module("edited")
    assert outcome(step_with(edited)) == SAME
    file.write_text(TRAIN.replace("gradient /= world", "gradient /= 1.0  # wrong"))
    importlib.reload(edited)
    assert outcome(step_with(edited)) == SUMMED
    file.write_text(TRAIN)
    importlib.reload(edited)
    assert outcome(step_with(edited)) == SAME


def test_a_module_that_was_edited_and_not_reloaded_is_refused(folder: Path) -> None:
    file = folder / "edited_later.py"
    file.write_text(TRAIN)
    edited: Any = importlib.import_module("edited_later")
    file.write_text(TRAIN.replace("gradient /= world", "gradient /= 1.0  # wrong"))
    with pytest.raises(BadCase, match=r"edited_later\.divide.*reload"):
        check(own_case(), step_with(edited))


def test_a_module_that_reads_the_environment_when_imported_stays_as_the_caller_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TRAIN.replace("AVERAGE = True", "AVERAGE = os.environ.get('MINE') != 'no'")
    (folder / "from_environment.py").write_text(text)
    train: Any = importlib.import_module("from_environment")
    monkeypatch.setenv("MINE", "no")
    assert outcome(step_with(train)) == SAME
    monkeypatch.delenv("MINE")
    assert outcome(step_with(train)) == SAME
    monkeypatch.setenv("MINE", "no")
    importlib.reload(train)
    assert outcome(step_with(train)) == SUMMED


@pytest.mark.parametrize("value", [threading.Lock(), (n for n in range(3))])
def test_a_new_value_that_cannot_be_pickled_is_refused_by_name(train: Any, value: Any) -> None:
    train.SETTINGS["inner"]["handle"] = value
    with pytest.raises(BadCase, match=r"trained\.SETTINGS\['inner'\]\['handle'\]"):
        check(own_case(), step_with(train))


def test_a_module_that_nobody_has_changed_differs_in_nothing_from_a_new_import() -> None:
    """It has a global of every kind: locks, files, random generators, models, hostile classes.

    Modules that ranks have imported in other tests are compared too, and those may have changed.
    """
    name = many_kinds.__name__
    assert not [edit for edit in changes_in({name}, ()).edits if edit.path[0] == name]
    assert many_kinds.right()  # Python and torch then keep caches of their own there
    changes = changes_in({name}, ())
    assert name in changes.compared
    assert not [edit for edit in changes.edits if edit.path[0] == name]


def test_a_module_that_only_ranks_can_import_is_not_judged_by_guessing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "only_ranks.py").write_text(TRAIN + "\nRANK = int(os.environ['RANK'])\n")
    monkeypatch.setenv("RANK", "0")
    module: Any = importlib.import_module("only_ranks")
    monkeypatch.delenv("RANK")
    module.AVERAGE = False
    verdict = check(own_case(), step_with(module))
    assert verdict.outcome == "unknown"
    assert "only_ranks can be imported on a rank, but not in a process that is no rank" in " ".join(
        str(verdict).split()
    )


def test_a_module_that_runs_a_command_when_it_is_imported_can_be_checked_again(
    folder: Path,
) -> None:
    """Looking for the command reads the environment under names that are bytes."""
    command = 'import subprocess\nCOMMIT = subprocess.run(["true"]).returncode\n'
    (folder / "with_command.py").write_text(command + TRAIN)
    step = step_with(importlib.import_module("with_command"))
    assert [outcome(step) for _ in range(3)] == [SAME] * 3
