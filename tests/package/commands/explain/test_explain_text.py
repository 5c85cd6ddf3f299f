"""The text of six setups is that of their golden files, and every text says what it must.

If you mean to change the text, ``UPDATE_GOLDEN=1 pytest tests/package/commands/explain`` writes the
files anew. Read the difference before you commit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.commands.explain import KnownGood, Setup, explain
from ddp_equivalence.commands.explain.explanation import beta, divided_by, number, times

ROOT = Path(__file__).parents[4]
GOLDEN = Path(__file__).parent / "golden"

SETUPS = {
    "same_as_one_device": Setup(
        batch=4, nodes=2, ranks_per_node=2, known_good=KnownGood.read("16@0.01"), examples=1001
    ),
    "sum_at_another_batch": Setup(
        batch=4,
        ranks_per_node=4,
        loss="sum",
        accumulation=3,
        accumulation_divided=False,
        known_good=KnownGood.read("12@0.01"),
        examples=1030,
    ),
    "tokens_under_adam": Setup(
        batch=8,
        nodes=2,
        ranks_per_node=4,
        loss="token-mean",
        accumulation=4,
        accumulation_divided=True,
        optimizer="adam",
        known_good=KnownGood.read("64@3e-4"),
        examples=100_000,
        drop_last=True,
    ),
    "uneven_replicas": Setup(
        batch=5,
        ranks_per_node=4,
        parallelism="data-parallel-loss-inside",
        known_good=KnownGood.read("5@0.1"),
    ),
    "adam_with_a_factor": Setup(
        batch=5,
        nodes=3,
        ranks_per_node=4,
        parallelism="all-reduce-sum",
        optimizer="adam",
        known_good=KnownGood.read("60@3e-4"),
    ),
    "hybrid_from_a_sum": Setup(
        batch=8,
        nodes=2,
        ranks_per_node=2,
        parallelism="hybrid",
        known_good=KnownGood.read("16@0.001", loss="sum"),
    ),
}


@pytest.mark.parametrize("name", SETUPS)
def test_the_text_reads_as_its_golden_file(name: str) -> None:
    text = str(explain(SETUPS[name]))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("width", [72, 96, 140])
@pytest.mark.parametrize("name", SETUPS)
def test_the_text_is_set_in_the_width_it_is_given(name: str, width: int) -> None:
    with settings.using(settings.Settings(width=width)):
        lines = str(explain(SETUPS[name])).splitlines()
    assert width - 35 < max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction("0.01"), "0.01"),
        (Fraction("0.08"), "0.08"),
        (0.01 * 8**0.5, "0.02828"),
        (Fraction(1, 300), "0.003333"),
        (Fraction(12), "12"),
        (Fraction(1281167), "1281167"),
        (Fraction("0.00125"), "0.00125"),
        (Fraction("0.00001"), "1e-5"),
        (Fraction("3.2"), "3.2"),
        (2.0e7, "20000000"),
        (Fraction(10**30), "1e30"),
    ],
)
def test_numbers_are_as_people_paste_them(value: Fraction | float, text: str) -> None:
    assert number(value) == text
    assert float(text) == pytest.approx(float(value), rel=1e-3)


def test_multiples_are_fractions_only_where_that_is_shorter() -> None:
    exact = ("4", "15/4", "2/3", "1/4", "5/3", "1/4096")
    texts = [times(Fraction(one)) for one in exact]
    assert texts == ["4", "3.75", "2/3", "1/4", "5/3", "1/4096"]
    assert times(Fraction(1001, 4096)) == "0.2444"
    assert (divided_by(Fraction(12)), divided_by(Fraction(1, 8))) == ("/ 12", "x 8")


def said(**fields: Any) -> str:
    """The text on one line, so that no line break is inside what the tests look for."""
    return " ".join(str(explain(Setup(**fields))).split())


UNEVEN = {
    "batch": 16,
    "ranks_per_node": 3,
    "parallelism": "data-parallel-loss-inside",
    "accumulation": 2,
    "accumulation_divided": False,
}
SUMMED = {"batch": 4, "ranks_per_node": 4, "parallelism": "all-reduce-sum", "optimizer": "adam"}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"known_good": KnownGood.read("32@0.01")},
            "Learning rate: 0.01 / 2 = 0.005 with that change, as on one device:",
        ),
        ({}, "a mean loss and batch 32, divided by 2, with the change above."),
        (
            {"known_good": KnownGood.read("16@0.01")},
            "(Your gradient is 2 g with the change above; each rate below includes the / 2 for "
            "that.) 0.005 keeps",
        ),
        ({}, "Either gives 2 g. A multiple of 3 also changes the effective batch, so run explain"),
        ({}, "multiply weight_decay by 2"),
        ({"optimizer": "adam"}, "Multiply eps by 2, and the factor"),
    ],
)
def test_what_accumulation_leaves_of_a_mend_is_in_every_number(
    more: dict[str, Any], says: str
) -> None:
    assert says in said(**UNEVEN, **more)


def test_mended_token_counts_leave_no_factor() -> None:
    text = said(**UNEVEN | {"loss": "token-mean"})
    assert "That gives g, the big batch's gradient." in text
    assert "a mean loss and batch 32, unchanged, with the change above." in text
    assert "Optimizer" not in text


def test_adam_is_told_of_linear_scaling_too_and_where_it_holds() -> None:
    text = said(**SUMMED, known_good=KnownGood.read("4@0.001"))
    assert "the learning rate to start with is 0.002." in text
    assert (
        "Start with 0.002 (square root, x 2), betas (0.6, 0.996) and eps 5e-9: where noise" in text
    )
    assert "0.004 (linear, x 4) keeps the distance per epoch if the gradient is much larger" in text
    assert "if noise dominates, it goes too far." in text
    smaller = said(**SUMMED, known_good=KnownGood.read("64@0.001"))
    assert "0.00025 (linear, x 1/4)" in smaller
    assert "if noise dominates, it does not go far enough." in smaller


def test_adams_eps_is_said_once_with_all_its_factors() -> None:
    text = said(**SUMMED, known_good=KnownGood.read("4@0.001"))
    assert "and eps 5e-9 in place of 1e-8." in text
    assert "Multiply the eps above by 4, which gives 2e-8, and the factor cancels" in text
    assert "Multiply eps" not in text
    # Where the square-root rule gives no betas, it still gives an eps.
    far = said(**SUMMED | {"ranks_per_node": 16}, known_good=KnownGood.read("4@0.001"))
    assert "Multiply the eps above by 16, which gives 4e-8, and the factor cancels" in far


@pytest.mark.parametrize(
    ("ranks", "start"),
    [
        (4, "0.002 (square root, x 2), betas (0.6, 0.996) and eps 5e-9:"),
        (9, "0.003 (square root, x 3), your betas (0.9, 0.999) and eps 3.333e-9:"),
        (16, "0.004 (square root, x 4), your betas (0.9, 0.999) and eps 2.5e-9:"),
    ],
)
def test_the_rate_for_adam_does_not_fall_where_the_rule_has_no_betas(
    ranks: int, start: str
) -> None:
    text = said(
        ranks_per_node=ranks, batch=32, optimizer="adam", known_good=KnownGood.read("32@0.001")
    )
    assert f"Start with {start}" in text
    assert ("Its betas would be" in text) == (ranks > 5)


@pytest.mark.parametrize(("loss", "what"), [("mean", "a mean over examples"), ("sum", "a sum")])
@pytest.mark.parametrize(
    "parts",
    [
        {"ranks_per_node": 2},
        {"ranks_per_node": 2, "parallelism": "data-parallel"},
        {"accumulation": 2, "accumulation_divided": True},
    ],
)
def test_which_losses_and_models_it_is_for_is_said_once(
    parts: dict[str, Any], loss: str, what: str
) -> None:
    text = said(batch=4, loss=loss, **parts)
    assert text.count(f"This is for a loss that is {what}") == 1
    assert "not for batch norm, dropout, class weights (`weight=`) or contrastive losses" in text


def test_one_batch_on_one_device_is_for_any_loss() -> None:
    assert "This is for a loss" not in said(batch=4)


def test_the_mean_over_tokens_is_over_all_of_them() -> None:
    text = said(batch=4, ranks_per_node=2, loss="token-mean")
    assert "the gradient of the mean loss over all tokens of these 8 examples" in text
    assert "all tokens" not in said(batch=4, ranks_per_node=2)


def test_replicas_that_idle_are_told_of() -> None:
    text = str(explain(Setup(batch=5, ranks_per_node=4, parallelism="data-parallel")))
    assert "per process, and is split over 3 replicas: 2 + 2 + 1" in text
    assert "1 replica idles" in text


def test_explaining_imports_no_torch() -> None:
    code = (
        "import sys; from ddp_equivalence.commands.explain import Setup, explain; "
        "text = str(explain(Setup(batch=4))); sys.exit('torch' in sys.modules or not text)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(9, 10), "0.9"),
        (Fraction(1, 2), "0.5"),
        (Fraction(0), "0"),
        (Fraction(-3, 5), "-0.6"),
        (1 - Fraction(1, 16000), "0.9999375"),
        (1 - Fraction(1, 64000), "0.999984375"),
        (1 - Fraction(1, 300000), "0.999996667"),
    ],
)
def test_a_beta_is_as_far_from_1_as_it_should_be(value: Fraction, text: str) -> None:
    assert beta(value) == text
