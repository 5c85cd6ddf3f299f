"""A trial: one strategy on one case of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.training import Compare, Steps
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.sharded_batch import sharded_batches


@dataclass(frozen=True)
class Trial:
    """A trial is one case on which one strategy is compared with the big batch.

    With ``backend`` None, the trial uses the backend of the run. ``on_gpu``: its ranks compute on
    GPUs, which draw other dropout masks than the CPU, where the big batch is computed. ``str()`` is
    its test id.
    """

    case: Case
    strategy: str
    steps: Steps = 1
    compare: Compare = "gradients"
    backend: str | None = None
    on_gpu: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``check`` for this trial."""
        return {"compare": self.compare, "steps": self.steps, "backend": self.backend}

    @property
    def cause(self) -> str | None:
        """The cause's name if the strategy is known to differ here; None if its promise holds."""
        return _cause(self)

    @property
    def factors(self) -> dict[str, object]:
        """The values that a trial is made of: a pairwise selection has every pair of them.

        Of a strategy that keeps the rule of another, only those that show this: the other one is
        tried with every pair.
        """
        case = self.case
        kept: dict[str, object] = {
            "strategy": self.strategy,
            "compare": self.compare,
            "cause": self.cause,
        }
        if STRATEGIES[self.strategy].has_the_rule_of:
            return kept
        return {
            **kept,
            "layout": case.layout,
            "model": case.model,
            "loss": case.loss,
            "shards": case.shards,
            "dtype": case.dtype_name,
            "exact": case.exact,
            "steps": self.steps if isinstance(self.steps, int) else "shorter_last",
        }

    def __str__(self) -> str:
        case = self.case
        parts = [case.model, case.loss, case.layout, case.shards, case.dtype_name]
        if self.steps != 1:
            steps = self.steps if isinstance(self.steps, int) else len(self.steps)
            parts.append(f"{steps}steps")
            if isinstance(self.steps, tuple):
                parts.append("shorter-last")
        if self.compare == "update":
            parts.append("update")
        return "-".join(map(str, parts))


@cache
def _cause(trial: Trial) -> str | None:
    """The cause in the first step that differs; None if no step differs."""
    cause_of_difference = STRATEGIES[trial.strategy].cause_of_difference
    batches = sharded_batches(trial.case, trial.steps)
    model = MODELS[str(trial.case.model)]
    masks = model.batch_coupled if trial.on_gpu and model.draws_random_numbers else None
    return next(filter(None, map(cause_of_difference, batches)), masks)
