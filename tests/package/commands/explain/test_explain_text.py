"""Questions of practitioners, as they are typed, are answered as in a golden file.

If you mean to change the text, ``UPDATE_GOLDEN=1 pytest tests/package/commands/explain`` writes the
file anew. Read the difference before you commit it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence.case import settings
from ddp_equivalence.commands.explain import KnownGood, Setup, explain
from ddp_equivalence.commands.explain.explanation import explanation_text, number
from ddp_equivalence.commands.main import main

ROOT = Path(__file__).parents[4]
GOLDEN = Path(__file__).parent / "golden" / "questions.txt"

SHORT = {
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
FULL = {
    "A sum that accumulates, at another batch, with an epoch.": (
        "--ranks-per-node 4 --batch 4 --loss sum --accumulation 3 --accumulation-not-divided "
        "--known-good 12@0.01 --examples 1030"
    ),
    "A mean over tokens with Adam, without a known learning rate.": (
        "--nodes 2 --ranks-per-node 4 --batch 8 --loss token-mean --accumulation 4 "
        "--accumulation-divided --optimizer adam --examples 100000"
    ),
    "Replicas that have uneven parts of the batch.": (
        "--ranks-per-node 4 --batch 5 --parallelism data-parallel-loss-inside --known-good 5@0.1"
    ),
    "AdamW at a batch for which the square-root rule has no betas.": (
        "--nodes 3 --ranks-per-node 4 --batch 5 --parallelism all-reduce-sum --optimizer adamw "
        "--known-good 5@3e-4"
    ),
    "DataParallel inside the nodes, and a known sum at another batch.": (
        "--nodes 2 --ranks-per-node 2 --batch 8 --parallelism hybrid --known-good 64@0.001 "
        "--known-loss sum"
    ),
    "Accelerate, with a last step that is shorter.": (
        "--like accelerate --ranks-per-node 2 --batch 4 --accumulation 3 --examples 32"
    ),
}
MOST_LINES = 6


def test_each_question_is_answered_as_in_its_golden_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = []
    for question, line in [
        *SHORT.items(),
        *((one, f"{text} --full") for one, text in FULL.items()),
    ]:
        assert main(["explain", *shlex.split(line)]) == 0
        text, errors = capsys.readouterr()
        assert errors == ""
        assert question not in SHORT or len(text.splitlines()) <= MOST_LINES, text
        blocks.append(f"{question}\n$ ddp-equivalence explain {line}\n{text}")
    text = "\n".join(blocks)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def said(**fields: Any) -> str:
    """The whole text on one line, so that no line break is inside what the tests look for."""
    return " ".join(str(explain(Setup(**fields))).split())


UNEVEN = {
    "batch": 16,
    "ranks_per_node": 3,
    "parallelism": "data-parallel-loss-inside",
    "accumulation": 2,
    "accumulation_divided": False,
}
SUMMED = {"batch": 4, "ranks_per_node": 4, "parallelism": "all-reduce-sum", "optimizer": "adam"}
WORKED = KnownGood.read


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        # What accumulation leaves of a mend is in every number.
        (UNEVEN, "(data-parallel): then the gradient is 2 times the big batch's."),
        (UNEVEN, "a mean loss and this batch, times 1/2, if you also multiply weight_decay and"),
        (UNEVEN | {"known_good": WORKED("32@0.01")}, "that change, the learning rate is 0.005:"),
        (UNEVEN | {"known_good": WORKED("16@0.01")}, "start with 0.01 (linear, x 2, x 1/2 for the"),
        (UNEVEN | {"optimizer": "adam"}, "multiply weight_decay, clipping's max_norm and eps by 2"),
        # Mended token counts leave no factor.
        (
            UNEVEN | {"loss": "token-mean"},
            "With that change, the learning rate is that of one "
            "device with a mean loss and this batch.",
        ),
        # Adam: the square-root rule, and its betas only where they average over two gradients.
        (
            SUMMED | {"known_good": WORKED("4@0.001")},
            "Adam start with 0.002 (square root, x 2), betas (0.6, 0.996) and eps 5e-9: where",
        ),
        (SUMMED | {"known_good": WORKED("4@0.001")}, "0.004 (linear) keeps the way of the weights"),
        (SUMMED | {"known_good": WORKED("4@0.001")}, "max_norm and eps by 4, or the loss by 1/4."),
        (
            SUMMED | {"ranks_per_node": 9, "known_good": WORKED("4@0.001")},
            "start with 0.003 (square root, x 3), your betas (0.9, 0.999) and eps 3.333e-9:",
        ),
        # What a loss, its factor and its tokens divide by.
        ({"batch": 4, "loss": "sum", "loss_times": "1/4"}, "it is multiplied by 1/4. So"),
        ({"batch": 4, "ranks_per_node": 2, "loss": "token-mean"}, "mean loss over all tokens of 8"),
        # An epoch.
        ({"batch": 64, "ranks_per_node": 4, "examples": 100}, "; the largest is of 100 examples"),
        (
            {"batch": 4, "loss": "sum", "examples": 7, "known_good": WORKED("4@1")},
            "In its last step, of 3, examples count 3/4 times.",
        ),
        (
            {"batch": 8, "examples": 12, "known_good": WORKED("8@1", "sum")},
            "In its last step, of 4, examples count 2 times.",
        ),
        (
            {"batch": 5, "accumulation": 4, "accumulation_divided": True, "examples": 30},
            "In its last step divide by 2: else examples count 1/2 times.",
        ),
    ],
)
def test_the_text_says_what_follows(fields: dict[str, Any], says: str) -> None:
    assert says in said(**fields)


@pytest.mark.parametrize(
    ("fields", "never"),
    [
        ({"batch": 4}, "Not exact with batch norm"),
        ({"batch": 4, "ranks_per_node": 2, "examples": 30}, "In its last step"),
        ({"batch": 4, "loss": "sum", "examples": 7}, "In its last step"),
        ({"batch": 4, "ranks_per_node": 2, "examples": 32}, "repeats"),
        ({"batch": 4, "ranks_per_node": 2}, "multiply"),
    ],
)
def test_the_text_warns_of_nothing_that_is_as_it_should_be(
    fields: dict[str, Any], never: str
) -> None:
    assert never not in said(**fields)


@pytest.mark.parametrize("width", [72, 96, 140])
def test_the_text_is_set_in_the_width_it_is_given(width: int) -> None:
    with settings.using(settings.Settings(width=width)):
        lines = str(
            explain(Setup(batch=4, ranks_per_node=4, known_good=WORKED("4@1")))
        ).splitlines()
    assert width - 35 < max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction("0.01"), "0.01"),
        (0.01 * 8**0.5, "0.02828"),
        (Fraction(1, 300), "0.003333"),
        (Fraction(12), "12"),
        (Fraction(1281167), "1281167"),
        (Fraction("0.00125"), "0.00125"),
        (Fraction("0.00001"), "1e-5"),
        (Fraction("3.2"), "3.2"),
        (2.0e7, "2e7"),
        (Fraction(10**30), "1e30"),
    ],
)
def test_numbers_are_as_people_paste_them(value: Fraction | float, text: str) -> None:
    assert number(value) == text
    assert float(text) == pytest.approx(float(value), rel=1e-3)


def test_explaining_imports_no_torch() -> None:
    code = (
        "import sys; from ddp_equivalence.commands.explain import Setup, explain; "
        "text = str(explain(Setup(batch=4))); sys.exit('torch' in sys.modules or not text)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# Torch does what the text says about weight decay and clipping.

FACTOR = 4.0
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.1, eps=1e-3, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.1, eps=1e-3, weight_decay=0.01)


def trained(make: Callable[..., torch.optim.Optimizer], factor: float, max_norm: float) -> Tensor:
    """Weights, shape (elements,), after five steps on a loss multiplied by ``factor``."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = make(model.parameters())
    for step in range(5):
        rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        (factor * model(rows).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("plain", "changed"),
    [
        (SGD, partial(SGD, lr=0.1 / FACTOR, weight_decay=0.01 * FACTOR)),
        (ADAM, partial(ADAM, eps=1e-3 * FACTOR, weight_decay=0.01 * FACTOR)),
        (ADAMW, partial(ADAMW, eps=1e-3 * FACTOR)),
    ],
)
@pytest.mark.parametrize("max_norm", [1e9, 0.05])
def test_a_factor_is_made_good_by_the_settings_that_the_text_names(
    plain: Callable[..., torch.optim.Optimizer],
    changed: Callable[..., torch.optim.Optimizer],
    max_norm: float,
) -> None:
    right = trained(plain, 1.0, max_norm)
    # The tolerance is for clip_grad_norm_, which adds 1e-6 to the norm.
    same = trained(changed, FACTOR, max_norm * FACTOR)
    torch.testing.assert_close(same, right, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(trained(plain, FACTOR, max_norm * FACTOR), right, rtol=1e-3)
    assert not torch.allclose(trained(changed, FACTOR, 0.05), right, rtol=1e-3)


def test_weights_are_decayed_as_much_with_the_advice() -> None:
    """Rate x weight_decay x steps is what an epoch takes from the logarithm of a weight."""

    def decayed(make: Any, rate: float, decay: float, steps: int) -> float:
        weight = torch.nn.Parameter(torch.ones((), dtype=torch.double))
        optimizer = make([weight], lr=rate, weight_decay=decay)
        for _ in range(steps):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        return float(weight.detach())

    before = decayed(torch.optim.AdamW, 1e-3, 0.1, 400)
    # The square root, for four times the batch, and the linear rate of SGD.
    assert decayed(torch.optim.AdamW, 2e-3, 0.2, 100) == pytest.approx(before, rel=1e-4)
    assert decayed(torch.optim.SGD, 4e-3, 0.1, 100) == pytest.approx(before, rel=1e-4)
    assert decayed(torch.optim.AdamW, 2e-3, 0.1, 100) != pytest.approx(before, rel=1e-2)


def test_the_short_text_has_no_more_than_the_full_one() -> None:
    explanation = explain(Setup(batch=4, ranks_per_node=4, known_good=WORKED("16@0.1")))
    short = explanation_text(explanation).splitlines()
    assert str(explanation).splitlines()[: len(short) - 1] == short[:-1]
