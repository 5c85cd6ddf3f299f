"""A step that is wrong on one rank, too, shows the line that leaves the loss of the case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence import Case
from ddp_equivalence.diagnosis.where.lines_of_divergences import UNLIKE_LOSS, UNLIKE_LOSS_ALONE
from tests.diagnosis.where import loss_steps as steps
from tests.diagnosis.where.faulty import unnamed

TAGS = Case(model=steps.Tagger, batch=steps.sequences, loss=steps.masked_mean, layout="1x2")
REWARDS = replace(TAGS, loss=steps.rewarded)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (REWARDS, steps.one_baseline_for_all),
        (TAGS, steps.mask_is_shifted),
        (TAGS, steps.counts_what_is_masked),
        (TAGS, steps.in_micro_batches),
        (TAGS, steps.changed_in_place),
        (replace(TAGS, layout="1x1"), steps.mask_is_shifted),
        (replace(TAGS, shards="7+5"), steps.counts_what_is_masked),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_that_leaves_the_loss_of_the_case_is_marked(case: Case, step: Any) -> None:
    where = unnamed(case, step)
    text = Path(steps.__file__).read_text("utf-8").splitlines()
    marked = [n for n, line in enumerate(text, 1) if line.endswith(f"# {step.__name__}")]
    assert where.beside_one_rank == ("" if case.layout == "1x1" else UNLIKE_LOSS_ALONE)
    assert where.marks == UNLIKE_LOSS
    assert any(one.is_fault for one in where.lines)
    assert marked[0] in [one.line.number for one in where.lines[:2]]
