"""The table of public bugs is well formed. Nothing is installed and nothing is run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.public_bugs.bugs import BUGS, CANDIDATES, PublicBug
from ddp_equivalence.diagnosis.causes import HYPOTHESES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "public_bugs"
PAGE = (ROOT / "docs" / "public_bugs.md").read_text(encoding="utf-8")

ALL = (*BUGS, *CANDIDATES)
PINNED = re.compile(r"[A-Za-z0-9-]+==\d+(\.\d+)+")
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+")


def test_at_least_six_public_bugs_have_names_of_their_own() -> None:
    assert len(BUGS) >= 6
    assert [name for name, times in Counter(bug.name for bug in ALL).items() if times > 1] == []


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.name)
def test_a_bug_is_cited_and_pins_two_different_versions(bug: PublicBug) -> None:
    assert bug.urls
    assert [url for url in bug.urls if not THREAD.fullmatch(url)] == []
    assert [each for each in bug.wrong + bug.right if not PINNED.fullmatch(each)] == []
    assert bug.wrong[0].partition("==")[0] == bug.right[0].partition("==")[0]
    assert bug.wrong[0] != bug.right[0]


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.name)
def test_a_bug_has_a_check_that_parses_and_has_a_case_and_a_step(bug: PublicBug) -> None:
    file, _, step = bug.check.partition(":")
    tree = ast.parse((FOLDER / "checks" / file).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            defined |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    assert {"case", step or "step"} <= defined


def test_every_expected_cause_is_a_known_cause() -> None:
    known = {hypothesis.name for hypothesis in HYPOTHESES}
    assert {bug.cause for bug in ALL if bug.cause is not None} <= known


def test_the_page_has_a_row_for_every_bug_with_its_versions_and_sources() -> None:
    rows = {
        line.split("|")[1].split(":")[0].strip(): line for line in PAGE.splitlines() if "|" in line
    }
    for bug in BUGS:
        row = rows[bug.name]
        missing = [each for each in (*bug.urls, *bug.wrong, *bug.right) if each not in row]
        assert missing == [], bug.name
        assert f"different ({bug.cause})" in row if bug.cause else "| different |" in row
        assert row.rstrip().endswith("| same |")
