"""A report about weights that differ between ranks points at the line that made them differ."""

from __future__ import annotations

import pytest

from tests.diagnosis.lines import steps_with_other_weights as steps
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults, notes

WEIGHTS = [
    (
        steps.seeds_by_rank,
        "nn.init.normal_(layer.weight, std=0.2)",
        "torch.manual_seed(100 + rank.rank)  seeds differ between ranks",
        "a broadcast of all weights from rank 0",
    ),
    (
        steps.loads_on_rank_0,
        "model.load_state_dict(state)",
        "changes 0.weight, 0.bias and 4 more; the weights differ between ranks from here on",
        "a broadcast of all weights from rank 0",
    ),
    (
        steps.broadcasts_only_matrices,
        "dist.broadcast(parameter.data, 0)",
        "broadcast of 0.weight, 2.weight, 4.weight in one group; weights differ after it",
        "",
    ),
]


@pytest.mark.parametrize(("step", "line", "note", "missing"), WEIGHTS)
def test_the_line_that_makes_weights_differ_is_pointed_at(
    step: Step, line: str, note: str, missing: str
) -> None:
    verdict = checked(case(), step, "weights_differ_between_ranks")
    (fault,) = (one for one in verdict.findings[0].lines if one.is_fault)
    assert (faults(verdict), fault.missing) == ([line], missing)
    assert note in notes(verdict)
    assert verdict.findings[0].fix == (
        "broadcast all 6 parameters from rank 0 before the first forward pass."
    )
