"""Files, tests and pages that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "examples/README.md", "docs/records/README.md"),
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
)
FOLDERS = ("ddp_equivalence", "tests", "docs", "examples", "benchmarks", "ci")
FILES = [
    *(path for path in ROOT.iterdir() if path.is_file()),
    *(path for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))),
]
EXISTING = [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in FILES]
TESTS = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
}
USERS_OWN = {"mine.py", "train.py", "test_mine.py", "my_step.py"}
"""Files that the documents tell a user to write."""


def _named_files(text: str) -> set[str]:
    """The names in backquotes that look like a file or a folder of this project."""
    quoted = re.findall(r"`([\w./*-]+)`", text)
    names = {name for name in quoted if re.fullmatch(r"[\w./-]+(\.(py|md|sh|ini|toml)|/)", name)}
    return names - USERS_OWN


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document: str) -> None:
    names = _named_files((ROOT / document).read_text(encoding="utf-8"))
    missing = {n for n in names if not any(path.endswith(f"/{n}") for path in EXISTING)}
    assert not missing


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_no_document_has_marks_of_a_merge_in_it(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert not re.findall(r"^(?:<{7}|>{7})(?: .*)?$", text, re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_of_a_document_leads_to_a_file(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    local = {link for link in links if not link.startswith("http")}
    missing = {link for link in local if not ((ROOT / document).parent / link).exists()}
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_heading_that_a_link_names_exists(document: str) -> None:
    links = re.findall(r"\]\(([^)#]*)#([^)]+)\)", (ROOT / document).read_text(encoding="utf-8"))
    missing = {
        f"{page}#{heading}"
        for page, heading in links
        if page.endswith(".md") or not page
        if heading not in _headings((ROOT / document).parent / page if page else ROOT / document)
    }
    assert not missing


def _headings(page: Path) -> set[str]:
    """The anchors of a page: those that it writes out, and its headings as GitHub spells them."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    spelt = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    return spelt | set(re.findall(r'<a id="(\w+)">', text))


def test_every_test_that_contributing_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert named
    assert named <= TESTS


def test_a_name_of_a_file_is_recognised() -> None:
    text = "see `comparison/tolerance.py`, `docs/` and `mine.py`, not `Verdict.shares` or `2x2`"
    assert _named_files(text) == {"comparison/tolerance.py", "docs/"}


def test_the_readme_is_at_most_200_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_lines_of_code_in_the_reports_of_observed_scripts_are_where_they_say() -> None:
    text = (ROOT / "docs/observe.md").read_text(encoding="utf-8")
    script = (ROOT / "tests/package/observed_scripts/scripts/classifier.py").read_text()
    lines = dict(enumerate(map(str.strip, script.splitlines()), 1))
    shown = re.findall(r"^[> ] classifier\.py:(\d+)  (\S.*)$", text, re.MULTILINE)
    assert shown
    assert {number: lines[int(number)] for number, _ in shown} == dict(shown)
    clips = re.findall(r"classifier\.py:(\d+): clipped", text)
    assert clips
    assert all("clip_grad_norm_(" in lines[int(number)] for number in clips)
