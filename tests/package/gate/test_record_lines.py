"""Records that were cut off, changed or made to do harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.gate import record
from ddp_equivalence.gate.record import NAME, RecordWriter, read_lines
from tests.package.gate.records import TESTS, read, write


def lines_of(folder: Path) -> list[str]:
    return (folder / NAME).read_text().splitlines(keepends=True)


def test_a_run_that_was_killed_leaves_what_it_has_done(tmp_path: Path) -> None:
    """At any byte."""
    folder = write(tmp_path / "whole")
    whole = (folder / NAME).read_bytes()
    beginning = whole.index(b"\n") + 1
    for length in range(beginning, len(whole), 97):
        (folder / NAME).write_bytes(whole[:length])
        found = read(folder)
        assert found.end is None
        assert len(found.tests) <= len(TESTS)
    (folder / NAME).write_bytes(whole)
    assert read(folder).end is not None


def test_another_process_goes_on_with_a_record(tmp_path: Path) -> None:
    path = tmp_path / NAME
    RecordWriter(path).write("record", schema=1)
    RecordWriter(path).write("end", exit_codes=[0], seconds=1.0)
    assert [line["kind"] for line in read_lines(path)] == ["record", "end"]


def test_a_record_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "record", checks={TESTS[0]: {"outcome": "different"}})
    text = (folder / NAME).read_text()
    assert text.count('"different"') == 1
    (folder / NAME).write_text(text.replace('"different"', '"same"'))
    with pytest.raises(BadCase, match="line 5 or one before it was changed"):
        read(folder)


@pytest.mark.parametrize("place", [1, 4])
def test_a_line_that_was_taken_out_or_moved_is_noticed(place: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "record")
    lines = lines_of(folder)
    (folder / NAME).write_text("".join(lines[:place] + lines[place + 1 :]))
    with pytest.raises(BadCase, match="was changed"):
        read(folder)
    lines[place], lines[place + 1] = lines[place + 1], lines[place]
    (folder / NAME).write_text("".join(lines))
    with pytest.raises(BadCase, match="was changed"):
        read(folder)


def test_a_record_of_a_later_version_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "record", schema=record.SCHEMA + 1)
    with pytest.raises(BadCase, match="a later ddp_equivalence wrote version 3"):
        read(folder)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("", "one that holds a record; this file is empty"),
        ("[]\n", "an object of JSON in each line; line 1 is none"),
        ("no JSON\n", "an object of JSON in each line; line 1 is none"),
        ('{"kind": 3}\n', "an object of JSON in each line; line 1 is none"),
        ('{"kind": "record", "schema": NaN}\n', "no number of JSON"),
        ('{"kind": ' + "[" * 100_000 + "\n", "an object of JSON in each line; line 1 is none"),
        ('{"kind": "record", "schema": 1}\n', "was changed"),
        ("{" + " " * (2 << 20) + "}\n", "lines of at most 1024 KiB"),
    ],
)
def test_what_is_no_record_is_refused(text: str, right: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(BadCase) as raised:
        read(tmp_path)
    assert right in raised.value.right


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(record.LARGEST_FILE + 1)  # it takes no room on the disk
    with pytest.raises(BadCase, match="at most 256 MiB"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "right"),
    [
        ("test", {"id": "a", "outcome": "passed", "seconds": 10**400}, "too large"),
        ("test", {"id": "a", "outcome": "passed", "seconds": "1"}, "is no number"),
        ("test", {"id": 3, "outcome": "passed", "seconds": 1}, "is no text"),
        ("test", {"outcome": "passed", "seconds": 1}, "'id'"),
        ("environment", {"values": 3}, "no attribute"),
        ("check", {"test": "a", "number": "x"}, "in line 2 'backend' is missing; record it again"),
        ("end", {"exit_codes": [0], "peak_mib": "x"}, "is no number"),
        ("end", {"exit_codes": ["0"]}, "is no exit code"),
    ],
)
def test_a_field_that_is_none_of_this_version_is_named(
    kind: str, fields: dict[str, object], right: str, tmp_path: Path
) -> None:
    writer = RecordWriter(tmp_path / NAME)
    writer.write("record", schema=1)
    writer.write(kind, **fields)
    with pytest.raises(BadCase) as raised:
        read(tmp_path)
    assert right in raised.value.right
    assert "line 2" in raised.value.right


def test_long_names_are_cut_and_controls_are_kept_out_of_the_file(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / NAME)
    writer.write("record", schema=1)
    writer.write("test", id="<b>\x1b[31m" + "x" * 9_000, outcome="passed", seconds=0.1)
    found = read(tmp_path)
    assert [len(name) for name in found.tests] == [2_000]
    assert "\x1b" not in (tmp_path / NAME).read_text()
    assert json.loads(lines_of(tmp_path)[1])["id"].startswith("<b>\x1b")


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadCase, match="as `record` writes it"):
        read(tmp_path)


def test_a_line_that_was_cut_off_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "record", ends=False)
    path = folder / NAME
    path.write_bytes(path.read_bytes()[:-40])
    RecordWriter(path).write("end", exit_codes=[-9], seconds=1.0)
    found = read(folder)
    assert found.end is not None
    assert found.exit_codes == (-9,)


@pytest.mark.parametrize("kind", ["record", "test"])
def test_nothing_comes_after_the_end(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "record")
    RecordWriter(folder / NAME).write(kind, schema=1, id="x", outcome="passed", seconds=1.0)
    with pytest.raises(BadCase, match="nothing after its end"):
        read(folder)


@pytest.mark.parametrize(("suite", "means"), [(True, "all"), (False, "none")])
def test_records_of_version_1_can_be_read(suite: bool, means: str, tmp_path: Path) -> None:
    """They said only whether the suite ran, which was all of it."""
    found = read(write(tmp_path / "record", schema=1, asked={"suite": suite}))
    assert found.suite == means
    assert found.checks
