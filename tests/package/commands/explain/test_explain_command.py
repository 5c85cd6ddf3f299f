"""``ddp-equivalence explain`` as its user types it: text, files and exit codes."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.commands.explain import Explanation, command, explanation, verification
from ddp_equivalence.commands.main import main

pytestmark = pytest.mark.self_check


def run(line: str) -> int:
    parser = argparse.ArgumentParser()
    command.add(parser)
    return command.run(parser.parse_args(line.split()))


def test_a_setup_is_explained_in_a_few_lines_or_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--nodes 2 --ranks-per-node 2 --batch 4 --known-good 16@0.01"
    assert run(line) == 0
    text, errors = capsys.readouterr()
    assert text.splitlines() == [
        "Effective batch 16 = 4 x 4 ranks, the known one. The gradient is the big batch's.",
        "The learning rate is 0.01: every update of 16 examples is then the same as on one device.",
        "Not exact with batch norm, dropout, class weights or contrastive losses. More: --full.",
    ]
    assert errors == ""
    assert run(f"{line} --full") == 0
    text, errors = capsys.readouterr()
    assert "every rank holds 16 / 16 = 1 g." in text
    assert errors == ""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--batch 0", "--batch is 0; it should be a whole number from 1"),
        (
            "--batch 1000000000000000",
            "--batch is 1000000000000000; it should be a whole number from 1",
        ),
        (
            "--batch 4 --gpus-per-node 1000000",
            "--ranks-per-node is 1000000; it should be a whole number",
        ),
        (
            "--batch 4 --known-loss sum",
            "--known-loss is sum; it should be left out, or given together with",
        ),
        ("--batch 100 --known-good 1@1e31", "--known-good is 1@1e31; it should be a learning rate"),
        *(
            (
                f"--batch 4 --known-good {text}",
                f"--known-good is {text}; it should be BATCH@LR, the batch",
            )
            for text in ("16@", "@0.01", "16@-1", "16@nan", "0.1@256", "16@1e999999999")
        ),
        (
            "--batch 4 --known-good 0@0.01",
            "--known-good is 0@0.01; it should be a whole number from 1",
        ),
        (
            "--batch 4 --loss token-mean --known-good 64@0.1 --known-loss sum",
            "--known-loss is sum; it should be mean: a loss summed over tokens grows with their",
        ),
        ("--batch 4 --betas 0.9", "--betas is 0.9; it should be two numbers below 1"),
        (
            "--batch 4 --betas 0.9,0.95",
            "--betas is 0.9,0.95; it should be left out, unless the optimizer",
        ),
        (
            "--batch 4 --tokens-over step",
            "--tokens-over is step; it should be left out, unless the loss",
        ),
        (
            "--batch 4 --loss-times two",
            "--loss-times is two; it should be numbers above 0 and world-size",
        ),
        (
            "--batch 4 --loss-times 0",
            "--loss-times is 0; it should be numbers above 0 and world-size",
        ),
        (
            "--batch 4 --like nanogpt --examples 9",
            "--examples is 9; it should be left out with --like",
        ),
        (
            "--batch 4 --like nanogpt --sampler distributed",
            "--sampler is distributed; it should be left",
        ),
        (
            "--batch 4 --like nanogpt --accumulation 12 --ranks-per-node 8",
            "--accumulation is 12; it should be a multiple of the 8 ranks",
        ),
        (
            "--batch 4 --like accelerate --parallelism ddp",
            "--parallelism is ddp; it should be left out",
        ),
        *(
            (
                f"--batch 4 --like {trainer} --accumulation-divided",
                f"--accumulation-divided should be left out with --like {trainer}, which divides",
            )
            for trainer in ("lightning", "accelerate", "hf-trainer")
        ),
        ("--batch 4 --accumulation-not-divided", "--accumulation-not-divided should be left out"),
        (
            "--batch 4 --accumulation 2",
            "--accumulation-divided is missing; it should be given: True",
        ),
        (
            "--batch 4 --parallelism none --ranks-per-node 2",
            "--ranks-per-node is 2; it should be 1",
        ),
        (
            "--batch 4 --parallelism data-parallel --nodes 2",
            "--nodes is 2; it should be 1: data-parallel is one process",
        ),
    ],
)
def test_bad_input_is_named_as_it_was_typed(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *line.split()]) == 2
    text, errors = capsys.readouterr()
    assert (text, errors.splitlines()[0]) == ("", "ddp-equivalence explain: bad input")
    assert errors.splitlines()[1].strip().startswith(says)


def test_what_ranks_confirm_ends_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--batch 4 --ranks-per-node 2 --loss sum --known-good 8@0.1 --verify") == 0
    assert "gradient, 4 g: the same on every rank (error " in capsys.readouterr().out


def test_arithmetic_that_ranks_do_not_confirm_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    divisions = explanation.divisions

    def without_average(*given: Any) -> list[tuple[str, Any]]:
        return [(says, 1 if "average" in says else by) for says, by in divisions(*given)]

    monkeypatch.setattr(explanation, "divisions", without_average)
    assert run("--batch 4 --ranks-per-node 2 --known-good 8@0.1 --verify") == 1
    text = capsys.readouterr().out
    assert "IT DIFFERS" in text
    assert "gradient, 2 g: something else (error 0.5)." in text
    assert text.count("something else") == 2


def test_what_fails_in_the_verification_ends_with_three(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(explanation: Explanation) -> object:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(verification, "verify", broken)
    assert main(["explain", "--batch", "4", "--verify"]) == 3
    text, errors = capsys.readouterr()
    assert "RuntimeError: out of luck" in errors
    assert text.startswith("Effective batch 4.")


def test_the_help_says_what_is_run_and_what_not_divided_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "and the weights after three steps with the learning rate that keeps the length" in text
    not_divided = "the loss of each micro-batch is not divided, so their gradients add up"
    assert f"--accumulation-not-divided {not_divided}" in text


def test_ranks_that_do_not_come_back_end_with_three(capsys: pytest.CaptureFixture[str]) -> None:
    with settings.using(settings.replaced(deadline=0.001)):
        code = run("--batch 4 --ranks-per-node 2 --verify")
    assert code == 3
    assert "not judged" in capsys.readouterr().out
