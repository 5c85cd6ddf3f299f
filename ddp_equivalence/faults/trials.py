"""Where each fault is planted: every layout, and every model, loss and type that it is met on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    """One fault, planted in a strategy on one case. ``hidden``: why it cannot show there."""

    fault: Fault
    trial: Trial

    @property
    def hidden(self) -> str | None:
        case, fault = self.trial.case, self.fault
        if fault.of_counts and _divide_by_one_number(case):
            return "every rank's loss divides by the same number"
        return fault.hidden(case.ranks)

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.trial.strategy}-{self.trial}"


def _divide_by_one_number(case: Case) -> bool:
    """True if the losses of all ranks divide by the same number."""
    return all(
        sharded_batch.cause_if_averaged(sharded_batch.shards.indices) is None
        for sharded_batch in sharded_batches(case)
    )


def fault_trials(
    names: Sequence[str] = (),
    layouts: Sequence[str] = LAYOUTS,
    every: bool = True,
) -> tuple[FaultTrial, ...]:
    """The trials of these faults (all, if none are named), by layout.

    ``every``: all strategies, pairs and types on all layouts. Without it each fault is met on all
    layouts with the first of them, and with the others on one layout.
    """
    found: list[FaultTrial] = []
    for name in names or FAULTS:
        found += _trials(FAULTS[name], layouts, every)
    # In the order of layouts, so that few sets of ranks are alive at a time.
    return tuple(sorted(found, key=lambda one: layouts.index(one.trial.case.layout)))


def _trials(fault: Fault, layouts: Sequence[str], every: bool) -> Iterator[FaultTrial]:
    for number, strategy in enumerate(fault.strategies):
        for pair, (model, loss) in enumerate(fault.pairs):
            for deal, shards in enumerate(fault.shards):
                for dtype in DTYPES:
                    first = number == pair == deal == 0 and dtype is torch.float64
                    for layout in layouts:
                        if not (every or first or layout == MAIN_LAYOUT):
                            continue
                        case = case_of(STRATEGIES[strategy], model, loss, layout, shards, dtype)
                        if fault.extra_examples:
                            more = case.catalogue_examples + fault.extra_examples
                            case = replace(case, examples=more)
                        trial = Trial(case, strategy, steps=fault.steps)
                        # Where the strategy differs anyway, two things would be wrong.
                        if fault.by_design or trial.cause is None:
                            yield FaultTrial(fault, trial)
