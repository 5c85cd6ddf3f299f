"""The receipt of a run on GPUs, and why one is refused."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.main import main
from ddp_equivalence.commands.suite_folder import suite_folder
from ddp_equivalence.gate.receipt import (
    LARGEST,
    Wanted,
    _digest,
    read_receipt,
    receipt_of,
    refusals,
    write_receipt,
)
from ddp_equivalence.gate.surroundings import source_digest
from tests.package.gate.records import read, write

NOW = datetime.datetime(2026, 11, 27, 10, tzinfo=datetime.UTC)

ON_GPU = "suite: test_ddp[mlp-1x2-float64-nccl]"
ON_CPU = "suite: test_ddp[mlp-1x2-float64-gloo_fallback]"
"""The same test where there is a GPU, and where there is none."""

WANTED = Wanted(
    source="c3", torch="2.12.1", tests=(ON_CPU,), must_run=("nccl",), most_days=30, key=""
)


def record(folder: Path, **changed: Any) -> Path:
    given = {"tests": {ON_GPU: {}}, "checks": {ON_GPU: {"backend": "nccl"}}}
    environment = {"torch": "2.12.1+cu130"}
    return write(folder, **{**given, "environment": environment, **changed})


def why(tmp_path: Path, wanted: Wanted = WANTED, key: str = "", **changed: Any) -> list[str]:
    receipt = receipt_of(read(record(tmp_path / "record", **changed)), key)
    return list(refusals(json.loads(json.dumps(receipt)), wanted, NOW))


def test_a_receipt_of_this_code_is_accepted(tmp_path: Path) -> None:
    assert why(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "d4"}, "it is of another version of ddp_equivalence"),
        ({"torch": "2.13.0"}, "it is of torch 2.12.1+cu130, and torch 2.13.0 is wanted"),
        ({"tests": (ON_CPU, "suite: test_new[1x2-gloo]")}, "1 tests are missing, such as suite"),
        ({"tests": (ON_CPU, ON_CPU)}, "1 tests are missing"),
        ({"must_run": ("data_parallel",)}, "nothing was compared on data_parallel"),
        ({"most_days": 0.5}, "it is 1 days old, and may be 0.5"),
        ({"key": "another"}, "it is not signed with the key"),
    ],
)  # fmt: skip
def test_it_is_refused_where_something_else_is_wanted(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (found,) = why(tmp_path, replace(WANTED, **change), key="a key")
    assert found.startswith(reason)


def test_a_run_that_failed_is_refused(tmp_path: Path) -> None:
    found = why(tmp_path, tests={ON_GPU: {"outcome": "failed"}}, exit_code=1)
    failed = f"1 tests failed, such as {ON_GPU}"
    assert found == ["the run did not pass: pytest ended with [1]", failed]


def test_every_run_of_pytest_must_have_passed(tmp_path: Path) -> None:
    receipt = receipt_of(read(record(tmp_path / "record")), "")
    for codes, reasons in (([0, 0], 0), ([0, 1], 1), ([], 1), ("00", 1)):
        changed = {**receipt, "exit_codes": codes}
        changed["digest"] = _digest({k: v for k, v in changed.items() if k != "digest"})
        assert len(list(refusals(changed, WANTED, NOW))) == reasons, codes


def test_a_run_that_was_cut_off_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(BadCase, match="came to its end"):
        why(tmp_path, ends=False)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one["tests"].update({ON_GPU: "skipped"}),
        lambda one: one["lanes"].update(data_parallel={"same": 1}),
        lambda one: one.update(made="2026-11-27T09:00:00+00:00"),
        lambda one: one.pop("digest"),
        lambda one: one.update(more=1),
    ],
)
@pytest.mark.parametrize("key", ["", "a key"])
def test_an_altered_receipt_is_refused(change: Change, key: str, tmp_path: Path) -> None:
    receipt = json.loads(json.dumps(receipt_of(read(record(tmp_path / "record")), key)))
    change(receipt)
    found = list(refusals(receipt, replace(WANTED, key=key), NOW))
    assert found == ["it was altered after it was written"]


def test_only_who_has_the_key_can_write_a_signed_one(tmp_path: Path) -> None:
    good = receipt_of(read(record(tmp_path / "record")), "a key")
    assert list(refusals(good, replace(WANTED, key="a key"), NOW)) == []
    forged = receipt_of(read(record(tmp_path / "other")), "")
    found = list(refusals(forged, replace(WANTED, key="a key"), NOW))
    assert found == ["it is not signed with the key in DDP_EQUIVALENCE_RECEIPT_KEY"]


def test_a_receipt_of_tomorrow_is_refused(tmp_path: Path) -> None:
    receipt = receipt_of(read(record(tmp_path / "record")), "")
    before = NOW - datetime.timedelta(days=9)
    (found,) = refusals(receipt, WANTED, before)
    assert found == "it was made on 2026-11-26, which has not come yet"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "x"}', '{"schema": 9}', "[" * 99_999])
def test_what_is_no_receipt_is_bad_input(text: str, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(text)
    with pytest.raises(BadCase):
        read_receipt(path)


def test_a_large_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(BadCase, match="at most 16 MiB"):
        read_receipt(path)


@pytest.mark.parametrize("content", [{"tests": 3, "lanes": [], "environment": None}, {}])
def test_fields_of_the_wrong_kind_are_refused_and_raise_nothing(
    content: dict[str, Any], tmp_path: Path
) -> None:
    found = list(refusals({**content, "digest": _digest(content)}, WANTED, NOW))
    assert len(found) >= 4


def test_the_command_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "receipt.json"
    write_receipt(read(record(tmp_path / "record")), path, "")
    assert main(["verify-receipt", str(path), "--must-run", "nccl"]) == 1
    text = capsys.readouterr().out
    assert text.startswith(f"refused: {path}\n  it is of another version of ddp_equivalence")
    assert "tests are missing, such as suite: tests/" in text
    with pytest.raises(SystemExit, match="2"):
        main(["verify-receipt", str(path), "--must-run", "nvlink"])
    assert main(["verify-receipt", str(path), "--max-age", "0"]) == 2
    assert main(["receipt", str(tmp_path / "record"), "--out", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_the_digest_of_the_source_sees_every_test_of_the_suite(tmp_path: Path) -> None:
    """A tolerance that was loosened, or a case that was taken out, makes it another one."""
    suite = tmp_path / "suite"
    planted = "diagnosis/test_planted_faults.py"
    for name in ("equivalence/test_a.py", "difference/test_b.py", planted):
        path = suite / "tests" / name
        path.parent.mkdir(parents=True)
        path.write_text("")
    (suite / "conftest.py").write_text("")
    (suite / "pytest.ini").write_text("")
    seen = {source_digest(suite)}
    for path in sorted(suite.rglob("*.*")):
        path.write_text("# changed\n")
        source_digest.cache_clear()
        seen.add(source_digest(suite))
    assert len(seen) == 6
    assert source_digest(suite_folder()) not in seen
