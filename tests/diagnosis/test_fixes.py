"""The fix that a report prints is applied, word for word, and the step is then the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.report.render import fixes
from tests.diagnosis.fixes import data, equal_copies, losses, places, reductions, sharded
from tests.diagnosis.fixes.programs import PROGRAMS, Program
from tests.diagnosis.names.small_case import case, report_of
from tests.package.own_cases import loss

pytestmark = pytest.mark.self_check

MODULES = (data, reductions, losses, places, sharded, equal_copies)
"""The modules that hold the programs."""

WITHOUT = {
    "batch_norm_local_statistics": "a property of the model, for which no fix is needed",
    "dropout_differs_from_reference": "a property of the model, for which no fix is needed",
    "batch_statistics_local": "only losses of the catalogue are known to have such a term",
    "ranks_differ_by_rounding": "no rank is off by more than rounding, before and afterwards",
    "graph_changed": "it takes two steps of one wrapper, which tests/diagnosis/causes has",
}
"""Causes of which no program is here, with the reason."""


def is_by_cause(program: Program) -> str:
    return f"{program.cause or 'elsewhere'}-{program.step.__name__}"


def in_every_run() -> set[str]:
    """The first program of each cause; of those without a cause, the first with each fix."""
    first = {one.cause or one.fix: is_by_cause(one) for one in reversed(PROGRAMS)}
    return set(first.values())


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(one, marks=() if is_by_cause(one) in in_every_run() else pytest.mark.thorough)
        for one in PROGRAMS
    ],
    ids=map(is_by_cause, PROGRAMS),
)
def test_a_fix_mends_the_program_that_shows_it(program: Program) -> None:
    options = dict(program.options or {})
    with settings.using(settings.replaced(trial_seconds=0.0)):
        verdict = check(program.case, program.step, **options)
        assert verdict.causes == tuple(filter(None, [program.cause])), verdict
        assert " ".join(fixes(verdict)) == program.fix
        if program.edits:
            mended = check(program.case, program.mended(), **options)
            assert mended.outcome == "same", mended


def test_every_cause_has_a_program_or_a_reason_why_it_has_none() -> None:
    shown = {program.cause for program in PROGRAMS}
    assert shown.isdisjoint(WITHOUT)
    assert {one.name for one in HYPOTHESES} == shown - {""} | set(WITHOUT)


def steps_twice_as_far(model: Any, shard: Any, rank: Rank) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    optimizer.step()


def test_a_learning_rate_that_differs_is_printed_beside_that_of_the_reference() -> None:
    verdict = check(case(), steps_twice_as_far, compare="update")
    assert "plain SGD, learning rate 0.1; that of the step is 0.2." in report_of(verdict)


def test_a_fix_has_edits_and_programs_without_a_fix_have_none() -> None:
    assert [one.step.__name__ for one in PROGRAMS if bool(one.fix) != bool(one.edits)] == []
