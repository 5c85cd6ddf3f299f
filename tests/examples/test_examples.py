"""Every example, run the way a user runs it, prints what the examples' page shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = CHECKOUT / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")

RIGHT = {
    "examples/digits.py": "step is big_batch: same",
    "examples/digits.py:trainer": "train is big_batch: same",
    "examples/gpt2_padded.py": "step_global_mean is big_batch: same",
}
WRONG = {
    "examples/digits.py:step_with_scaled_loss": (
        "step_with_scaled_loss is not big_batch: sum_not_mean"
    ),
    "examples/gpt2_padded.py:step_rank_mean": (
        "step_rank_mean is not big_batch: token_counts_weighted_equally"
    ),
}


@pytest.mark.parametrize(("target", "verdict"), RIGHT.items(), ids=RIGHT.keys())
def test_a_right_step_is_the_big_batch(target: str, verdict: str) -> None:
    exit_code, printed = run("ddp_equivalence", "check", *target.split())
    assert printed.startswith(f"{verdict}\n"), printed
    assert exit_code == 0
    assert f"$ ddp-equivalence check {target}\n{verdict}\n" in PAGE


@pytest.mark.parametrize(("target", "verdict"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_step_is_caught_and_its_cause_is_named(target: str, verdict: str) -> None:
    exit_code, printed = run("ddp_equivalence", "check", *target.split())
    assert printed.startswith(f"{verdict}\n"), printed
    assert exit_code == 1
    assert f"$ ddp-equivalence check {target}\n{verdict}\n" in PAGE


@pytest.mark.parametrize("import_mode", ["prepend", "importlib"])
def test_somebody_elses_repository_needs_nothing_but_the_installed_plugin(
    import_mode: str, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(EXAMPLES / "someone_elses_repository", repository)
    exit_code, printed = run("pytest", f"--import-mode={import_mode}", folder=repository)
    assert exit_code == 0, printed
    assert "= compared with one big batch =" in printed
    assert "2 passed" in printed


def run(module: str, *arguments: str, folder: Path = CHECKOUT) -> tuple[int, str]:
    """Exit code and everything printed, warnings too."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout
