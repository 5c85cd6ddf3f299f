"""The text is code: three setups against their golden files, and what every text must say.

After a change that is meant, ``UPDATE_GOLDEN=1 pytest tests/explain/test_explain_text.py`` writes
the files anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from ddp_equivalence import session
from ddp_equivalence.explain import KnownGood, Setup, explain
from ddp_equivalence.explain.numbers import divided_by, number, times

ROOT = Path(__file__).parents[2]
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
    with session.using(session.Settings(width=width)):
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
    ],
)
def test_numbers_are_as_people_paste_them(value: Fraction | float, text: str) -> None:
    assert number(value) == text
    assert float(text) == pytest.approx(float(value), rel=1e-3)


def test_multiples_are_fractions_only_where_that_is_shorter() -> None:
    values = (Fraction(4), Fraction(15, 4), Fraction(2, 3), Fraction(1, 4), Fraction(5, 3))
    assert [times(one) for one in values] == ["4", "3.75", "2/3", "1/4", "5/3"]
    assert (divided_by(Fraction(12)), divided_by(Fraction(1, 8))) == ("/ 12", "x 8")


def test_replicas_that_idle_are_told_of() -> None:
    text = str(explain(Setup(batch=5, ranks_per_node=4, parallelism="data-parallel")))
    assert "per process, and is split over 3 replicas: 2 + 2 + 1" in text
    assert "1 replica idles" in text


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        (96, "4 steps of 3 micro-batches."),
        (91, "The last step adds up 10 examples a rank: its gradient is 5/6 as large"),
        (101, "The last step adds up 3 examples a rank: its gradient is 1/4 as large"),
    ],
)
def test_a_shorter_last_sum_is_told_of(examples: int, says: str) -> None:
    setup = Setup(
        batch=4,
        ranks_per_node=2,
        loss="sum",
        accumulation=3,
        accumulation_divided=False,
        examples=examples,
    )
    with session.using(session.Settings(width=140)):
        assert says in str(explain(setup))


def test_explaining_imports_no_torch() -> None:
    code = (
        "import sys; from ddp_equivalence.explain import Setup, explain; "
        "import ddp_equivalence.commands.explain; "
        "text = str(explain(Setup(batch=4))); sys.exit('torch' in sys.modules or not text)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
