"""Compares the operations of a script on its ranks with those in one process that has all rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.lines_beside_a_cause import (
    findings_beside_one_rank,
    one_rank_shows_more,
)
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.beside_one_rank import (
    COARSEST,
    BesideOneRank,
    logs_of,
)
from ddp_equivalence.diagnosis.whereabouts.deaf_methods import deaf_methods
from ddp_equivalence.diagnosis.whereabouts.kinship import Deal
from ddp_equivalence.diagnosis.whereabouts.lines_of_partings import lines_of_partings
from ddp_equivalence.diagnosis.whereabouts.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.whereabouts.parting import partings
from ddp_equivalence.diagnosis.whereabouts.past_autograd import past_autograd
from ddp_equivalence.measurement.one_rank import OneRank
from ddp_equivalence.measurement.operations import Operations
from ddp_equivalence.observed_scripts import coupled_rows
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.arrangements import order_of
from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.looked_at_closer import SecondRun, read_operations
from ddp_equivalence.observed_scripts.running_script import CannotReplay


def with_one_process(
    step: ObservedStep, analysis: AnalysisOfScript, findings: tuple[Finding, ...], second: SecondRun
) -> tuple[Finding, ...]:
    """The findings with the lines at which the ranks part from one process, if these say more.

    Without a known cause, the analysis shows these lines in its report.
    """
    view = analysis.view
    best = findings[0] if findings and findings[0].accepted else None
    is_coupled = best is not None and best.cause == coupled_rows.NAME
    if view is None or not second.operations or not (is_coupled or one_rank_shows_more(best)):
        return findings
    beside = unless_it_fails(
        lambda: _beside(step, view, second.operations, second.module), lambda why: None
    )
    if best is None or not is_coupled:
        analysis.compare_with(beside)
        return findings_beside_one_rank(findings, view, beside)
    lines = () if beside is None else lines_of_partings(beside.partings, view)
    return (replace(best, lines=lines or best.lines), *findings[1:])


def _beside(
    step: ObservedStep, view: View, by_rank: Mapping[int, Operations], module: str
) -> BesideOneRank | None:
    oracle = step.oracle
    if oracle is None or len(by_rank) < step.record.world_size:
        return None
    if not all(one.complete for one in by_rank.values()):
        return None
    try:
        alone = read_operations(Path(oracle.logged(step.group, step.rows, module)))
    except (CannotReplay, OSError):
        return None
    eps = max(torch.finfo(getattr(torch, name)).eps for name in _dtypes(alone))
    if not alone.complete or eps > COARSEST:
        return None
    order = order_of(step.record, oracle.arrangement, step.group, step.rows)
    if sorted(order) != sorted(range(len(step.rows))):
        return None  # some rows are in several micro-batches
    place = {row: number for number, row in enumerate(order)}
    rows = tuple(tuple(place[row] for row in of_rank) for of_rank in step.rows_by_rank)
    deal = Deal(rows, len(order), eps, float(view.expected.abs().max()))
    runs = OneRank(by_rank, alone)
    logs = logs_of(runs, deal)
    return BesideOneRank(
        is_right_alone=True,
        factor_alone=1.0,
        partings=partings(logs),
        past_autograd=past_autograd(logs),
        deaf=deaf_methods(runs, is_right_alone=True),
    )


def _dtypes(alone: Operations) -> set[str]:
    return {value.dtype for value in alone.values if value.is_floating_point} or {"float64"}
