"""Ranks that build another batch than the reference show nothing, and are told which leaf it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_equivalence import BadCase, check
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from tests.package.own_cases import loss, make_batch, own_case, right_step

UNSEEDED = """
import numpy as np, torch

ROWS = torch.from_numpy(np.random.default_rng().standard_normal((12, 5))).float()

def make_batch(generator):
    return {"rows": ROWS, "targets": torch.randn(12, 3, generator=generator)}
"""


KEPT = """
import torch

DATA = {"rows": torch.randn(12, 5, generator=torch.Generator()), "targets": torch.ones(12, 3)}

def make_batch(generator):
    return DATA
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that keeps its data, and hands them out at each call."""
    (tmp_path / "kept_data.py").write_text(KEPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("kept_data")
    del sys.modules["kept_data"]


def writes_to_its_batch(model: Any, batch: Any, rank: Any) -> None:
    own = {name: leaf[rank.rank * 6 :][:6].clone() for name, leaf in batch.items()}
    right_step(model, own, rank)
    batch["rows"].zero_()


def test_a_step_that_writes_to_its_batch_changes_no_data_of_the_user(kept: ModuleType) -> None:
    """On warm ranks the module would have other data in the next check."""
    case = own_case(batch=kept.make_batch, shards="own", dtype=None)
    assert [check(case, writes_to_its_batch).outcome for _ in range(3)] == ["same"] * 3


@pytest.fixture
def unseeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that draws random data when it is imported."""
    (tmp_path / "unseeded_data.py").write_text(UNSEEDED)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("unseeded_data")
    del sys.modules["unseeded_data"]


def test_random_data_of_an_import_reach_the_ranks_as_this_process_has_them(
    unseeded: ModuleType,
) -> None:
    assert check(own_case(batch=unseeded.make_batch), right_step).outcome == "same"


def drawn_by_every_process(generator: torch.Generator) -> dict[str, Tensor]:
    batch = make_batch(generator)
    batch["rows"] += os.getpid() % 1000
    return batch


def test_data_that_every_process_makes_otherwise_are_unknown_and_name_the_leaf() -> None:
    verdict = check(own_case(batch=drawn_by_every_process), right_step)
    assert verdict.unknown_because is UnknownBecause.RANKS_BUILD_ANOTHER_BATCH
    assert "ranks 0, 1 build another batch than the reference: ['rows']" in verdict.reason
    assert "another batch than the reference" in str(verdict)


def other_targets_on_rank_1(generator: torch.Generator) -> dict[str, Tensor]:
    batch = make_batch(generator)
    batch["targets"] += os.environ.get("RANK") == "1"
    return batch


def other_names_on_rank_1(generator: torch.Generator) -> dict[str, Any]:
    """Nothing depends on this leaf, so the gradients are the same."""
    return make_batch(generator) | {"name": f"rank {os.environ.get('RANK') == '1'}"}


def other_unused_numbers_on_rank_1(generator: torch.Generator) -> dict[str, Any]:
    unused = torch.full((12, 2), float(os.environ.get("RANK") == "1"))
    return make_batch(generator) | {"unused": unused}


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"compare": "update"}])
@pytest.mark.parametrize("shards", ["equal", "own"])
def test_one_rank_with_other_data_is_neither_different_nor_the_same(
    options: dict[str, Any], shards: str
) -> None:
    case = own_case(batch=other_targets_on_rank_1, shards=shards)
    verdict = check(case, right_step, **options)
    assert verdict.unknown_because is UnknownBecause.RANKS_BUILD_ANOTHER_BATCH, verdict
    assert "rank 1 builds another batch than the reference: ['targets']" in verdict.reason


@pytest.mark.parametrize(
    ("builder", "leaf"),
    [(other_names_on_rank_1, "['name']"), (other_unused_numbers_on_rank_1, "['unused']")],
)
def test_other_data_that_change_no_gradient_are_no_pass(builder: Any, leaf: str) -> None:
    verdict = check(own_case(batch=builder), right_step)
    assert verdict.outcome == "unknown"
    assert f"{leaf} is not the same, bit for bit" in verdict.reason


def product(generator: torch.Generator) -> dict[str, Tensor]:
    """How a matrix product is rounded depends on the number of threads."""
    left = torch.randn(64, 4000, generator=generator)
    right = torch.randn(4000, 5, generator=generator)
    rows = (left @ right)[:12]
    return {"rows": rows / rows.std(), "targets": torch.randn(12, 3, generator=generator)}


def test_the_number_of_threads_makes_no_other_batch() -> None:
    assert check(own_case(batch=product, layout="1x1"), right_step).outcome == "same"
    assert check(own_case(batch=product), right_step).outcome == "same"


GENERATOR = torch.Generator()


def goes_on(generator: torch.Generator) -> dict[str, Tensor]:
    return make_batch(GENERATOR)


def summed(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)


def test_a_builder_that_makes_another_batch_at_each_call_is_refused() -> None:
    GENERATOR.manual_seed(1)
    with pytest.raises(BadCase, match=r"same batch at each call; \['rows'\] was another one") as it:
        check(own_case(batch=goes_on), summed)
    assert it.value.field == "batch"


def test_a_report_can_be_printed_although_the_builder_goes_on() -> None:
    GENERATOR.manual_seed(1)
    verdict = check(own_case(batch=goes_on), right_step)
    assert str(verdict).startswith("right_step")
