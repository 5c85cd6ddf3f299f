"""The page about records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.gate.judge import Policy
from ddp_equivalence.gate.page import write_page
from tests.package.gate.records import TESTS, TODAY, read, write

MINE = TESTS[2]

DETAILS: Mapping[str, Any] = {
    "report": "different: step (mine.py:18): gradients are a sum <b>\n> mine.py:20",
    "shares": {"pieces": "examples", "ranks": [0, 1], "rows": [[2.0, None], [0.5, 1.0]]},
    "parameters": [["1.bias", 1.0, 3e-16, 5.7e-14], ["0.weight", 2e-16, 3e-16, 5.7e-14]],
}

WRONG = {MINE: {"outcome": "different", "cause": "sum_not_mean", "error": 1.0, "details": DETAILS}}


def page(path: Path, *folders: Path) -> str:
    write_page([read(folder) for folder in folders], Policy(), TODAY, path)
    return path.read_text()


class Tags(HTMLParser):
    """The tags of a page, and the values of attributes that load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_shows_what_is_wrong_and_what_has_changed(tmp_path: Path) -> None:
    new = write(tmp_path / "new", checks=WRONG, tests={MINE: {"outcome": "failed"}})
    text = page(tmp_path / "page.html", write(tmp_path / "old"), new)
    parsed = Tags(text)
    assert parsed.open == []
    assert parsed.loaded == []
    assert "red: old -&gt; new (the same packages)" in text
    assert "gradients are a sum &lt;b&gt;" in text
    cells = re.findall(r'<td style="--hue: (\d+); --strength: (\d+)">([\d.?]+)</td>', text)
    expected = [("20", "60", "2.00"), ("0", "0", "?"), ("220", "30", "0.50"), ("220", "0", "1.00")]
    assert cells == expected
    bars = re.findall(r'class="bar( beyond)?" style="width: ([\d.]+)%"', text)
    assert [beyond.strip() for beyond, _ in bars] == ["beyond", ""]
    assert float(bars[0][1]) > float(bars[1][1])
    now = "different [sum_not_mean] (failed)"
    assert f'<td class="name">{MINE}</td><td>same</td><td>{now}</td>' in text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "\x1b[2J{{ 7 * 7 }}{% if %}"])
def test_names_of_users_are_text(name: str, tmp_path: Path) -> None:
    checks = {name: {"strategy": name, "layout": name, "cause": name, "outcome": "different"}}
    folder = write(tmp_path / "record", tests={name: {}}, checks=checks)
    text = page(tmp_path / "page.html", folder)
    assert "<script>alert" not in text
    assert "\x1b" not in text
    assert "49" not in re.findall(r">([^<]*)<", text)
    assert text.count("<script>") == 1


def test_one_record_alone_has_a_page(tmp_path: Path) -> None:
    text = page(tmp_path / "page.html", write(tmp_path / "record", ends=False))
    assert "cut off" in text
    assert "What has changed" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_a_page_of_many_tests_stays_small(tmp_path: Path) -> None:
    many: dict[str, dict[str, object]] = {f"suite: test_{n}": {} for n in range(5_000)}
    folder = write(tmp_path / "record", tests=many)
    text = page(tmp_path / "page.html", folder)
    assert text.count("<tr") > 5_000
    assert len(text) < 2_000_000
