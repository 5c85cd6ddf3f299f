"""Every example is judged as the examples' page shows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_equivalence import Verdict, check, observe
from ddp_equivalence.checking.simulated import simulate
from ddp_equivalence.commands.simulate import report_lines
from ddp_equivalence.commands.user_file import load
from ddp_equivalence.observed_scripts import launch
from tests.combinations import one_of_each
from tests.package.forks import completed, started
from tests.package.one_server import with_server_of_these_tests
from tests.package.someone_elses_run import LONGEST, environment

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = CHECKOUT / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")

RIGHT = {
    "examples/digits.py": "step is big_batch: same",
    "examples/digits.py:trainer": "train is big_batch: same",
    "examples/gpt2_padded.py": "step_global_mean is big_batch: same",
    "examples/trainer_of_transformers.py": "step is big_batch: same",
    "examples/loop_with_accelerate.py": "step is big_batch: same",
    "examples/trainer_of_lightning.py": "step is big_batch: same",
    "examples/loop_with_fabric.py": "step is big_batch: same",
    "examples/adversarial.py": "Train is big_batch: same",
}
WRONG = {
    "examples/digits.py:step_with_scaled_loss": "sum_not_mean",
    "examples/gpt2_padded.py:step_rank_mean": "token_counts_weighted_equally",
    "examples/divided_by_the_node.py": "divided_by_local_world_size",
    "examples/trainer_of_transformers.py:step_of_rank_means": "token_counts_weighted_equally",
}
LIBRARIES = {
    "examples/trainer_of_transformers.py": ("transformers", "accelerate"),
    "examples/loop_with_accelerate.py": ("accelerate",),
    "examples/trainer_of_lightning.py": ("lightning",),
    "examples/loop_with_fabric.py": ("lightning",),
}
"""Those of the extra `trainers`. Where one is not installed, its example is skipped."""


def libraries(row: tuple[str, str]) -> tuple[str, ...]:
    """The libraries of an example that its target names."""
    return LIBRARIES.get(row[0].partition(":")[0], ())


@pytest.mark.self_check
@pytest.mark.parametrize(("target", "headline"), one_of_each(libraries, RIGHT.items()))
def test_an_example_that_is_the_same_is_judged_as_the_page_shows(
    target: str, headline: str
) -> None:
    verdict = verdict_on(target)
    assert verdict.outcome == "same", str(verdict)
    assert str(verdict).startswith(f"{headline}\n")
    assert f"$ ddp-equivalence check {target}\n{headline}\n" in PAGE


@pytest.mark.self_check
@pytest.mark.parametrize(("target", "cause"), one_of_each(libraries, WRONG.items()))
def test_an_example_that_differs_is_judged_as_the_page_shows(
    target: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    verdict = verdict_on(target)
    assert verdict.causes == (cause,), str(verdict)
    headline = str(verdict).partition("\n")[0]
    assert f"$ ddp-equivalence check {target}\n{headline}\n" in PAGE


@pytest.mark.self_check
def test_an_example_with_its_own_reference_says_what_is_wrong_in_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(CHECKOUT)
    verdict = verdict_on("examples/adversarial.py:TrainWithoutWrapper")
    assert verdict.wrong_step is not None
    assert (verdict.wrong_step.number, verdict.wrong_step.differs) == (1, "gradients")
    headline, *lines = str(verdict).splitlines()
    at = next(number for number, line in enumerate(lines) if "leaves the own gradients" in line)
    assert f"\n{headline}\n  ...\n{lines[at - 1]}\n{lines[at]}\n" in PAGE


@pytest.mark.self_check
@pytest.mark.parametrize(
    ("words", "outcome", "cause"),
    one_of_each(
        lambda row: True,
        [("", "different", "token_counts_weighted_equally"), (" --count-all", "same", None)],
    ),
)
def test_the_script_that_is_observed_is_judged_as_the_pages_show(
    words: str, outcome: str, cause: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = f"torchrun --standalone --nproc-per-node 2 examples/train.py{words}"
    monkeypatch.setattr(launch, "start", started)
    observed = observe(command)
    report = str(observed)
    assert (observed.outcome, observed.verdict.cause) == (outcome, cause), report
    assert observed.verdict.lane.name == "gloo"  # the script names no backend
    shown = f"$ ddp-equivalence observe -- {command}\n{report.partition(chr(10))[0]}\n"
    assert shown in PAGE
    if outcome == "different":
        start = "\n".join(line for line in report.splitlines()[:7])
        assert start in README
        assert f"{shown}{start.partition(chr(10))[2]}\n" in PAGE


@pytest.mark.self_check
def test_the_example_that_is_simulated_leaves_what_its_page_shows() -> None:
    found = load(EXAMPLES / "divided_by_the_node.py", "step")
    simulation = simulate(replace(found.case, layout="128x8"), found.step)
    *lines, seconds = report_lines(simulation)
    command = "$ ddp-equivalence simulate examples/divided_by_the_node.py --layout 128x8"
    assert "\n".join((command, *lines)) in (CHECKOUT / "docs" / "scale.md").read_text("utf-8")
    assert seconds.startswith("  in ")


def verdict_on(target: str) -> Verdict:
    file, _, name = target.partition(":")
    for library in LIBRARIES.get(file, ()):
        if find_spec(library) is None:
            pytest.skip(f'needs {library}: pip install ".[trainers]"')
    found = load(CHECKOUT / file, name or "step")
    return check(found.case, found.step, **found.options)


def test_the_command_of_the_page_prints_the_report_that_it_shows_and_nothing_else() -> None:
    target = "examples/gpt2_padded.py:step_rank_mean"
    command = [sys.executable, "-m", "ddp_equivalence", "check", target]
    done = completed(command, CHECKOUT, with_server_of_these_tests(environment()), LONGEST)
    exit_code, printed = done.returncode, done.stdout + done.stderr
    report = [line for line in printed.splitlines() if not line.startswith("explaining the ")]
    assert report[0].startswith("different: step_rank_mean ("), printed  # no library's warning
    assert "\n".join([f"$ ddp-equivalence check {target}", *report, "```"]) in README, printed
    assert exit_code == 1


def test_somebody_elses_repository_needs_nothing_but_the_installed_plugin(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(EXAMPLES / "someone_elses_repository", repository)
    command = [sys.executable, "-m", "pytest"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "= compared with one big batch =" in done.stdout
    assert "2 passed" in done.stdout
