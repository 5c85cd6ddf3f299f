"""The short answer: five questions of practitioners, each on at most six lines.

``UPDATE_GOLDEN=1 pytest tests/package/commands/explain`` writes the golden files anew.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from ddp_equivalence.commands.explain import Setup, explain
from ddp_equivalence.commands.explain.explanation import number, times
from ddp_equivalence.commands.explain.text import summary_text
from ddp_equivalence.commands.main import main
from tests.package.commands.explain.test_explain_simulation import setups

GOLDEN = Path(__file__).parent / "golden" / "questions.txt"

QUESTIONS = {
    "The recipe says batch 256 at 0.1; I have 8 GPUs with 32 each.": (
        "--ranks-per-node 8 --batch 32 --known-good 256@0.1"
    ),
    "We trained on 4 nodes with 8 GPUs at 0.4. Which learning rate on 16 nodes?": (
        "--nodes 16 --ranks-per-node 8 --batch 32 --known-good 1024@0.4 --examples 1281167"
    ),
    "My loss is a sum, and DDP averages over my 4 GPUs.": (
        "--ranks-per-node 4 --batch 4 --loss sum --known-good 16@0.01 --known-loss sum"
    ),
    "Hugging Face's Trainer on 8 GPUs, 4 sequences each, 4 accumulation steps; 2e-5 was for 32.": (
        "--like hf-trainer --ranks-per-node 8 --batch 4 --accumulation 4 --known-good 32@2e-5"
    ),
    "I all_reduce the gradients myself, on 2 nodes with 2 GPUs. Is 0.01 still right?": (
        "--nodes 2 --ranks-per-node 2 --batch 4 --parallelism all-reduce-sum --known-good 16@0.01"
    ),
}
MOST_LINES = 6


def answer(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain", *shlex.split(line)]) == 0
    text, errors = capsys.readouterr()
    assert errors == ""
    return text


def test_each_question_is_answered_as_in_its_golden_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = []
    for question, line in QUESTIONS.items():
        text = answer(line, capsys)
        assert len(text.splitlines()) <= MOST_LINES, text
        blocks.append(f"{question}\n$ ddp-equivalence explain {line}\n{text}")
    text = "\n".join(blocks)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@hypothesis_settings(max_examples=200, deadline=None)
@given(setups())
def test_the_short_answer_says_what_the_full_one_says(setup: Setup) -> None:
    explanation = explain(setup)
    short = " ".join(summary_text(explanation).split())
    rates, factor = explanation.learning_rates, explanation.factor / explanation.unit
    assert f"Effective batch {setup.effective_batch}" in short
    assert ("To mend it" in short) == (not explanation.is_multiple)
    if explanation.is_multiple and rates is None and factor != 1:
        assert f"The gradient is {times(factor)}" in short
    if rates is not None and rates.scaling == 1:
        assert f"learning rate is {number(rates.same_step)}" in short
    elif rates is not None:
        assert number(rates.same_step) in short
        assert ("weight_decay" in short) == (setup.optimizer != "adam" or rates.relative != 1)
    epoch = explanation.epoch
    assert epoch is None or f"An epoch has {epoch.steps} step" in short
    assert short.endswith("More: --full.")


def test_adams_weights_are_decayed_as_much_with_the_advice() -> None:
    """Rate x weight_decay x steps is what an epoch takes from the logarithm of a weight."""

    def decayed(rate: float, decay: float, steps: int) -> float:
        weight = torch.nn.Parameter(torch.ones((), dtype=torch.double))
        optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=decay)
        for _ in range(steps):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        return float(weight.detach())

    before = decayed(1e-3, 0.1, 400)
    assert decayed(1e-3 * 2, 0.1 * 2, 100) == pytest.approx(before, rel=1e-4)  # square root, x 4
    assert decayed(1e-3, 0.1 * 4, 100) == pytest.approx(before, rel=1e-4)  # the rate unchanged
    assert decayed(1e-3 * 2, 0.1, 100) != pytest.approx(before, rel=1e-2)


def test_sgds_weights_are_decayed_as_much_at_the_linear_rate() -> None:
    assert pytest.approx((1 - 1e-3 * 0.1) ** 400, rel=1e-4) == (1 - 4e-3 * 0.1) ** 100
