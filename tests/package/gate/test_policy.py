"""The file in which a team says what is red."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.gate.judge import Policy, read_policy
from tests.package.gate.records import DEFAULTS, TESTS, found, judged, write

MINE = TESTS[2]
BUCKET = next(iter(DEFAULTS))


def policy(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return read_policy(path)


def test_a_level_of_the_policy_counts(tmp_path: Path) -> None:
    chosen = policy(tmp_path, '[levels]\ndefault_changed = "yellow"\n')
    old, new = write(tmp_path / "old"), write(tmp_path / "new", defaults={BUCKET: "50"})
    judgement = judged(old, new, chosen)
    assert found(judgement) == [("yellow", "default_changed", BUCKET)]
    assert judgement.findings[0].decided_by == "policy.toml: levels.default_changed"


def test_a_ratio_of_the_policy_counts(tmp_path: Path) -> None:
    chosen = policy(tmp_path, "[ratios]\nerror = 100\n")
    old, new = write(tmp_path / "old"), write(tmp_path / "new", checks={MINE: {"error": 3e-15}})
    assert found(judged(old, new, chosen)) == []
    assert found(judged(old, new)) == [("red", "error_grew", MINE)]


EXCEPTION = """
[[exceptions]]
finding = "verdict_worse"
of = "mine*"
level = "ignored"
reason = "a bug of ours, mended in January"
until = 2026-11-{day}
"""


def test_an_exception_counts_until_its_day(tmp_path: Path) -> None:
    worse = {name: {"outcome": "different", "error": 1.0} for name in TESTS[1:]}
    old, new = write(tmp_path / "old"), write(tmp_path / "new", checks=worse)
    judgement = judged(old, new, policy(tmp_path, EXCEPTION.format(day=26)))
    assert found(judgement) == [
        ("red", "verdict_worse", TESTS[1]),
        ("ignored", "verdict_worse", MINE),
    ]
    assert "exceptions[1]: a bug of ours" in judgement.findings[1].decided_by
    judgement = judged(old, new, policy(tmp_path, EXCEPTION.format(day=25)))
    assert found(judgement) == [
        ("red", "verdict_worse", TESTS[1]),
        ("red", "verdict_worse", MINE),
        ("yellow", "exception_expired", "exceptions[1]"),
    ]


@pytest.mark.parametrize(
    ("text", "field", "right"),
    [
        ("[levels]\nverdict_wrose = 'red'\n", "levels", "a table with one of verdict_worse,"),
        ("[levels]\nverdict_worse = 'green'\n", "levels.verdict_worse", "one of red, yellow"),
        ("[ratios]\nerror = 0.5\n", "ratios.error", "a number above 1"),
        ("[ratios]\nerror = true\n", "ratios.error", "a number above 1"),
        ("[ratios]\nerror = inf\n", "ratios.error", "a number above 1"),
        ("levels = 3\n", "levels", "a table"),
        ("[other]\n", "policy", "a table with one of levels, ratios, exceptions"),
        ("[[exceptions]]\nof = 'x'\n", "exceptions[1].reason", "why it is an exception"),
        ("[[exceptions]]\nreason = 'x'\n", "exceptions[1].of", "* stands for anything"),
        ("[[exceptions]]\nreason = 'x'\nuntil = '2027-01-01'\n", "exceptions[1].until", "a day"),
        ("[[exceptions]]\nreason = 'x'\nfinding = 'all'\n", "exceptions[1].finding", "one of"),
        ("exceptions = 1\n", "exceptions", "tables"),
        ("[levels\n", "policy", "a file in TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, field: str, right: str, tmp_path: Path) -> None:
    with pytest.raises(BadCase) as raised:
        policy(tmp_path, text)
    assert raised.value.field == field
    assert right in raised.value.right


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCase, match="a file that can be read"):
        read_policy(tmp_path / "none.toml")


def test_an_exception_means_the_very_name_that_it_gives(tmp_path: Path) -> None:
    """Brackets are those of parametrised tests."""
    names = ("suite: test_x[1x2]", "suite: test_x1")
    worse = {name: {"outcome": "different", "error": 1.0} for name in names}
    new = write(tmp_path / "new", tests={name: {} for name in names}, checks=worse)
    old = write(tmp_path / "old", tests={name: {} for name in names})
    text = EXCEPTION.format(day=26).replace("mine*", "suite: test_x[1x2]")
    judgement = judged(old, new, policy(tmp_path, text))
    assert found(judgement) == [
        ("red", "verdict_worse", "suite: test_x1"),
        ("ignored", "verdict_worse", "suite: test_x[1x2]"),
    ]


def test_an_exception_is_about_its_finding_alone(tmp_path: Path) -> None:
    new = write(tmp_path / "new", checks={MINE: {"limit": 1.0}})
    judgement = judged(write(tmp_path / "old"), new, policy(tmp_path, EXCEPTION.format(day=26)))
    assert found(judgement) == [("red", "limit_grew", MINE)]
