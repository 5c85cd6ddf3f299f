"""Examples that the loss of the case reads and no rank does, and the line that takes the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ddp_equivalence import Case
from tests.diagnosis.where.faulty import average, distance, unnamed


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Every example has one row with a target, and two views of each of two rows without."""
    return {
        "rows": torch.randn(8, 6, generator=generator),
        "targets": torch.randint(0, 4, (8,), generator=generator),
        "weak": torch.randn(8, 2, 6, generator=generator),
        "strong": torch.randn(8, 2, 6, generator=generator),
    }


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def of_views(model: Any, weak: Tensor, strong: Tensor) -> Any:
    wanted = model(weak).softmax(-1).detach()
    return -(wanted * model(strong).log_softmax(-1)).sum(-1).mean()


def loss(model: Any, examples: dict[str, Tensor]) -> Any:
    views = (examples[name].flatten(0, 1) for name in ("weak", "strong"))
    labelled = functional.cross_entropy(model(examples["rows"]), examples["targets"])
    return labelled + of_views(model, *views)


def as_many_views_as_targets(model: Any, shard: Any, rank: Any) -> None:
    labelled = TensorDataset(shard["rows"], shard["targets"])
    views = TensorDataset(*(shard[name].flatten(0, 1) for name in ("weak", "strong")))
    loaders = (DataLoader(one, batch_size=2) for one in (labelled, views))
    parts = list(zip(*loaders, strict=False))  # fault
    for (rows, targets), (weak, strong) in parts:
        labelled_loss = functional.cross_entropy(model(rows), targets)
        ((labelled_loss + of_views(model, weak, strong)) / len(parts)).backward()
    average(model)


CASE = Case(model=model, loss=loss, batch=batch, layout="1x2")


def test_examples_that_no_rank_reads_are_named_with_the_line_that_takes_the_others() -> None:
    where = unnamed(CASE, as_many_views_as_targets)
    assert where.headline == "no rank reads examples 2, 3, 6, 7 of weak and strong"
    assert distance(where, as_many_views_as_targets) == 0, where.lines
    assert [line.is_fault for line in where.lines[:1]] == [True]
