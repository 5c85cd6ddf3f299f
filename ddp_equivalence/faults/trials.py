"""The trials of fault injection: every fault, in the strategies and on the cases that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import LAYOUTS, Trial, case_of
from ddp_equivalence.strategies.sharded_batch import sharded_batches

DTYPES = (torch.float64, torch.float32)
MAIN_LAYOUT = "2x2"


@dataclass(frozen=True)
class FaultTrial:
    """One fault that is planted in one trial of the catalogue. ``str()`` is its test id."""

    fault: Fault
    trial: Trial

    @property
    def why_it_cannot_show(self) -> str | None:
        """The reason why the fault cannot change the gradients of this trial; None if it can."""
        case = self.trial.case
        if self.fault.needs_unequal_divisors and _ranks_divide_by_one_number(case):
            return "every rank's loss divides by the same number"
        return self.fault.why_it_cannot_show(case.ranks)

    @property
    def factors(self) -> dict[str, object]:
        """The values of its trial, with the fault in place of the cause."""
        return {**self.trial.factors, "cause": None, "fault": self.fault.name}

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.trial.strategy}-{self.trial}"


def fault_trials(
    names: Sequence[str] = (), layouts: Sequence[str] = LAYOUTS, every: bool = True
) -> tuple[FaultTrial, ...]:
    """The trials of the faults with these ``names``, or of all faults, sorted by layout.

    With ``every``, each fault is tried with all its strategies, pairs, shards and dtypes on all
    layouts. Without it, only the first combination of these is tried on all layouts, and the
    others on one layout.
    """
    chosen: list[FaultTrial] = []
    for name in names or FAULTS:
        chosen += _trials_of(FAULTS[name], layouts, every)
    # Trials of one layout share their ranks, so in this order few ranks are alive at a time.
    return tuple(sorted(chosen, key=lambda trial: layouts.index(trial.trial.case.layout)))


def _trials_of(fault: Fault, layouts: Sequence[str], every: bool) -> Iterator[FaultTrial]:
    combinations = product(fault.strategies, fault.pairs, fault.shards, DTYPES)
    for (number, combination), layout in product(enumerate(combinations), layouts):
        if not (every or number == 0 or layout == MAIN_LAYOUT):
            continue
        strategy, pair, shards, dtype = combination
        case = case_of(STRATEGIES[strategy], *pair, layout, shards, dtype)
        if fault.extra_examples:
            case = replace(case, examples=case.catalogue_examples + fault.extra_examples)
        trial = Trial(case, strategy, steps=fault.steps)
        # Where the strategy differs anyway, there would be two causes.
        if fault.strategy_differs_anyway or trial.cause is None:
            yield FaultTrial(fault, trial)


def _ranks_divide_by_one_number(case: Case) -> bool:
    """True if the losses of all ranks divide by the same number, so that their mean is right."""
    return all(
        sharded_batch.cause_if_averaged(sharded_batch.shards.indices) is None
        for sharded_batch in sharded_batches(case)
    )
