"""What the adapters share: the data set, the micro-batches, and the room of a trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ddp_equivalence import BadCase, Rank
from ddp_equivalence.adapters import Rows, micro_batch_size, trainers_room


def rank_of(world_size: int) -> Rank:
    return Rank(0, world_size, 0, world_size, 0, 1, torch.device("cpu"), "gloo")


def test_rows_are_the_examples_of_every_tensor_of_the_batch() -> None:
    rows = Rows({"rows": torch.arange(6).view(3, 2), "classes": torch.tensor([7, 8, 9])})
    assert len(rows) == 3
    assert {key: leaf.tolist() for key, leaf in rows[1].items()} == {"rows": [2, 3], "classes": 8}


def test_examples_are_divided_into_steps_ranks_and_micro_batches() -> None:
    assert micro_batch_size(24, rank_of(2), steps=3, accumulation=2) == 2
    with pytest.raises(BadCase, match="24 examples"):
        micro_batch_size(24, rank_of(5), steps=1, accumulation=1)


def test_the_room_of_a_trainer_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    seed, variables = torch.initial_seed(), dict(os.environ)
    with trainers_room(rank_of(2)) as folder:
        Path(folder, "log.txt").write_text("a line")
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        torch.manual_seed(seed + 1)
    assert (torch.initial_seed(), dict(os.environ)) == (seed, variables)
    assert not Path(folder).exists()


@pytest.mark.parametrize(("world_size", "seen"), [(1, None), (2, "0")])
def test_one_process_sees_no_variable_of_torchrun(
    world_size: int, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with trainers_room(rank_of(world_size)):
        assert os.environ.get("LOCAL_RANK") == seen
    assert os.environ["LOCAL_RANK"] == "0"
