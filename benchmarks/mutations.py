"""Change single gradients of a right step, and count the changes that a check calls the same.

    python benchmarks/mutations.py

A model has a trunk, a head of full weight in the loss, and a second head whose weight goes from 1
to 1e-6. After a right step one change is made: to one parameter of the trunk or of the second head,
or to one element of it; on all ranks, or on one rank alone. Each change is checked in four dtypes.
For each dtype and weight a line says how many changes were different, how many were unknown, and
how many were the same. A change that is the same although it moves a gradient by more than the
limit that the check prints for that parameter is a mistake of this package; it is printed, and the
exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, Verdict, check

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = (1.0, 3e-2, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6)
PARAMETERS = ("trunk.weight", "trunk.bias", "second.weight", "second.bias")
FACTORS = {
    "zeroed": 0.0,
    "negated": -1.0,
    "halved": 0.5,
    "doubled": 2.0,
    "tenfold": 10.0,
    "1 % larger": 1.01,
}


@dataclass(frozen=True)
class Mutation:
    """Multiply one parameter's gradient, or its largest element alone, by a factor."""

    parameter: str
    factor: float
    name: str
    one_element: bool
    one_rank: bool

    def apply(self, model: nn.Module, rank: Rank) -> None:
        gradient = model.get_parameter(self.parameter).grad
        assert gradient is not None
        if self.one_rank and rank.rank != 1:
            return
        if not self.one_element:
            gradient.mul_(self.factor)
            return
        largest = int(gradient.abs().argmax())
        gradient.view(-1)[largest].mul_(self.factor)

    def __str__(self) -> str:
        part = "largest element of " if self.one_element else ""
        where = "on rank 1" if self.one_rank else "on all ranks"
        return f"{part}{self.parameter} {self.name} {where}"


class TwoHeads(nn.Module):
    """Two linear heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(rows).tanh()
        return self.first(hidden), self.second(hidden)


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Sixteen examples with a target for each head."""
    sizes = {"rows": 6, "first": 4, "second": 4}
    return {name: torch.randn(16, size, generator=generator) for name, size in sizes.items()}


def loss_with(weight: float) -> Callable[[nn.Module, Any], Tensor]:
    """The loss in which the second head has this weight."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = model(batch["rows"])
        return F.mse_loss(first, batch["first"]) + weight * F.mse_loss(second, batch["second"])

    return loss


def check_mutation(weight: float, dtype: torch.dtype, mutation: Mutation | None) -> Verdict:
    """The verdict on a right DDP step after which the mutation is made, if there is one."""
    loss = loss_with(weight)

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()
        if mutation is not None:
            mutation.apply(model, rank)

    case = Case(model=TwoHeads, batch=batch, loss=loss, layout="1x2", dtype=dtype)
    return check(case, step)


def mutations() -> Iterator[Mutation]:
    """Every combination of parameter, factor, extent and ranks."""
    for parameter in PARAMETERS:
        for name, factor in FACTORS.items():
            for one_element in (False, True):
                for one_rank in (False, True):
                    yield Mutation(parameter, factor, name, one_element, one_rank)


def is_mistake(verdict: Verdict, mutation: Mutation) -> bool:
    """True if the verdict is "same" although the change is larger than the limit printed for it.

    How large the change is follows from its factor. The step's own rounding may have taken a part
    of it back, at most the error that one device makes.
    """
    if verdict.outcome != "same":
        return False
    assert verdict.comparison is not None
    assert verdict.analysis is not None
    (changed,) = [one for one in verdict.comparison.parameters if one.name == mutation.parameter]
    limit = changed.limit.element if mutation.one_element else changed.limit.relative
    rounding = verdict.analysis.floor_of(changed) or 0.0
    return abs(mutation.factor - 1) - 2 * rounding > limit


def main() -> int:
    """Print one line for each dtype and weight, and the mistakes."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    mistakes: list[str] = []
    total = Counter[str]()
    print(f"{'dtype':10}{'weight':>8}  right step  different  unknown  same")
    for dtype in DTYPES:
        for weight in WEIGHTS:
            right = check_mutation(weight, dtype, None)
            outcomes = Counter[str]()
            for mutation in mutations():
                verdict = check_mutation(weight, dtype, mutation)
                outcomes[verdict.outcome] += 1
                if is_mistake(verdict, mutation):
                    mistakes.append(f"{dtype} weight {weight:g}: {mutation}: {verdict.error:.2g}")
                elif verdict.outcome == "same":
                    total[f"{dtype} {mutation}"] += 1
            name = str(dtype).removeprefix("torch.")
            counts = "".join(f"{outcomes[key]:>9}" for key in ("different", "unknown", "same"))
            print(f"{name:10}{weight:>8g}  {right.outcome:<10}{counts}", flush=True)
    print(f"{len(mistakes)} changes beyond their printed limit were called the same")
    for line in mistakes:
        print(f"  {line}")
    print("changes within their printed limits, called the same:")
    for text, count in total.items():
        print(f"  {text}: {count} of {len(WEIGHTS)} weights")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
