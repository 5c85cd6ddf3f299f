"""What was not certainly seen is not said: lines that look as if they were the fault."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import check
from tests.diagnosis.lines.faulty_line import case, mean_squares, notes

FOUR = case("1x4")


def last_under_no_sync(model: Any, batch: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    parts = list(zip(*(leaf.chunk(4) for leaf in batch.values()), strict=True))
    for number, (x, y) in enumerate(parts):
        synchronises = number == 0
        if synchronises:
            mean_squares(ddp, {"x": x, "y": y}).div(4).backward()
        else:
            with ddp.no_sync():
                mean_squares(ddp, {"x": x, "y": y}).div(4).backward()


def test_a_block_that_python_comes_back_to_is_counted_once() -> None:
    verdict = check(FOUR, last_under_no_sync)
    assert verdict.cause == "accumulation_boundary_off_by_one"
    assert "synchronises is false 3 of 4 times" in notes(verdict)
