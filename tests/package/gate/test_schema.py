"""The published schema of a record says what records hold, all of it and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError

from ddp_equivalence.gate.record import HASH, SCHEMA, read_lines
from ddp_equivalence.gate.surroundings import defaults
from ddp_equivalence.pytest_plugin.results import OF_CHECKS
from tests.package.gate.records import MINE, lines_of_kind, schema, validate, write


def test_a_record_is_as_the_schema_says(tmp_path: Path) -> None:
    folder = write(tmp_path / "record", collected=3, checks={MINE: {"error": None}})
    lines = list(read_lines(folder / "record.jsonl"))
    for line in lines:
        validate(line)
    assert {line["kind"] for line in lines} == set(schema()["$defs"]) - NO_LINES
    assert schema()["$defs"]["record"]["properties"]["schema"]["const"] == SCHEMA


NO_LINES = {"hash", "number", "count", "details"}
"""Definitions that are parts of lines."""


def test_every_field_of_a_check_is_described() -> None:
    described = set(schema()["$defs"]["check"]["properties"])
    assert described == {*OF_CHECKS, "kind", "test", "number", HASH}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("record", {"schema": SCHEMA + 1}),
        ("record", {"asked": {"suite": True}}),
        ("check", {"outcome": "fine"}),
        ("check", {"error": "small"}),
        ("check", {"ranks": -1}),
        ("check", {"digests": "a1"}),
        ("check", {"details": {"report": "different"}}),
        ("test", {"outcome": "ran"}),
        ("test", {"seconds": None, "id": 3}),
        ("end", {"exit_codes": ["0"]}),
        ("defaults", {"values": {"torch.optim.SGD(lr)": 0.1}}),
        ("environment", {"values": {"packages": ["torch"]}}),
    ],
)
def test_another_line_is_not(tmp_path: Path, kind: str, changed: dict[str, Any]) -> None:
    line = lines_of_kind(write(tmp_path / "record"), kind)[0]
    validate(line)
    with pytest.raises(ValidationError):
        validate({**line, **changed})
    with pytest.raises(ValidationError):
        validate({name: value for name, value in line.items() if name != "so_far"})


def test_defaults_are_those_of_training_and_objects_have_one_for_each_field() -> None:
    found = defaults()
    policy = "torch.distributed.fsdp.fully_shard(mp_policy."
    assert found[f"{policy}param_dtype)"] == "None"
    assert f"{policy})" not in found
    assert "transformers.TrainingArguments(optim)" in found
    assert not [name for name in found if "(hub_" in name or "(output_dir" in name]
