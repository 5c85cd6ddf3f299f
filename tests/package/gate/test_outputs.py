"""What the gate writes for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from ddp_equivalence.gate.outputs import (
    MOST_ROWS,
    github_annotations,
    write_json,
    write_junit,
    write_markdown,
)
from tests.package.gate.records import TESTS, judged, write

HOSTILE = "suite: <img src=x onerror=alert(1)> | `rm` @everyone \x1b[2J"
"""The name of a test, as somebody may write it in a pull request."""

WORSE = {TESTS[2]: {"outcome": "different", "cause": "sum_not_mean", "error": 1.0}}


def test_markdown_shows_every_level_and_no_markup_of_users(tmp_path: Path) -> None:
    new = write(tmp_path / "new", checks=WORSE, tests={HOSTILE: {}})
    path = tmp_path / "summary.md"
    path.write_text("what another step has written\n")
    write_markdown(judged(write(tmp_path / "old"), new), path)
    text = path.read_text()
    assert text.startswith("what another step has written\n### ")
    assert "red: old -&gt; new" in text
    row = r"| red | verdict\_worse | mine.py | same -&gt; different \[sum\_not\_mean\]"
    assert row in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert "@everyone" not in text
    assert all(line.count("|") in (0, 6) for line in text.splitlines())
    assert text.count("<details>") == text.count("</details>") == 1


def test_markdown_of_many_findings_stays_short(tmp_path: Path) -> None:
    names: dict[str, dict[str, object]] = {f"suite: test_{n}": {} for n in range(1_000)}
    judgement = judged(write(tmp_path / "old", tests=names), write(tmp_path / "new"))
    write_markdown(judgement, tmp_path / "summary.md")
    text = (tmp_path / "summary.md").read_text()
    assert f"{1_000 - MOST_ROWS} more" in text
    assert len(text) < 20_000


def test_junit_has_a_case_for_each_check_with_its_numbers(tmp_path: Path) -> None:
    new = write(tmp_path / "new", checks=WORSE, defaults={"torch.optim.SGD(lr)": "1"})
    old = write(tmp_path / "old", defaults={"torch.optim.SGD(lr)": "0.001"})
    write_junit(judged(old, new), tmp_path / "junit.xml")
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    cases = {case.get("name"): case for case in suite}
    failure = cases[TESTS[2]].find("failure")
    assert failure is not None
    assert failure.get("type") == "verdict_worse"
    properties = {one.get("name"): one.get("value") for one in cases[TESTS[0]].iter("property")}
    assert properties["error"] == "2e-16"
    assert properties["limit"] == "5.7e-14"
    assert cases["torch.optim.SGD(lr)"].find("failure") is not None


def test_json_has_every_finding(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    write_json(judged(write(tmp_path / "old"), write(tmp_path / "new", checks=WORSE)), path)
    found = json.loads(path.read_text())
    assert (found["colour"], found["compared"]) == ("red", 3)
    assert [one["kind"] for one in found["findings"]] == ["verdict_worse"]


def test_an_annotation_stays_on_its_line(tmp_path: Path) -> None:
    judgement = judged(write(tmp_path / "old", tests={HOSTILE: {}}), write(tmp_path / "new"))
    (line,) = (one for one in github_annotations(judgement) if "onerror" in one)
    title = "vanished%3A A test or a check is not there any more."
    assert line.startswith(f"::error title={title}::suite")
    assert "\n" not in line
    assert "\x1b" not in line
