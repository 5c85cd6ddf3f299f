"""How far training moves the weights: plain SGD on one device, and a trainer of the user's own."""

from __future__ import annotations

from torch import Tensor

from ddp_equivalence.case.batch import concatenate, move, take
from ddp_equivalence.comparison.gradients import updates_of, weights_of
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.skeleton.fresh import seed_all
from ddp_equivalence.report.script.skeleton.placeholders import (
    SEED,
    SHARDS,
    big_batches,
    model_at_start,
    step,
)


def on_this_rank(rank: Rank) -> dict[str, Tensor | None]:
    """How far the trainer moves the weights on this rank; it is called once for all steps."""
    model = model_at_start().to(rank.device)
    shards = [take(one, of[rank.rank]) for one, of in zip(big_batches(), SHARDS, strict=True)]
    before = weights_of(model)
    seed_all(SEED + 1)
    returned = step(model, move(concatenate(shards), rank.device), rank)
    if returned is None:
        return updates_of(model, before)
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        weight = returned.get(name) if parameter.requires_grad else None
        found[name] = None if weight is None else weight.detach().to(rank.device) - before[name]
    return found
