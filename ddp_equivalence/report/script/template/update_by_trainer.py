"""The change of the weights by the user's own trainer, on a rank."""

from __future__ import annotations

from torch import Tensor

from ddp_equivalence.case.batch import concatenate, move, take
from ddp_equivalence.comparison.gradients import updates_of, weights_of
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.template.placeholders import (
    SEED,
    SHARDS,
    Gradients,
    big_batches,
    model_at_start,
    step,
)
from ddp_equivalence.report.script.template.start_from_seed import seed_all


def on_this_rank(rank: Rank) -> Gradients:
    """The change of the weights by the trainer on this rank; one call trains all steps."""
    model = model_at_start().to(rank.device)
    shards = [
        take(batch, indices[rank.rank])
        for batch, indices in zip(big_batches(), SHARDS, strict=True)
    ]
    before = weights_of(dict(model.named_parameters()))
    seed_all(SEED + 1)
    returned = step(model, move(concatenate(shards), rank.device), rank)
    if returned is None:
        return updates_of(dict(model.named_parameters()), before)
    updates: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        weight = returned.get(name) if parameter.requires_grad else None
        updates[name] = None if weight is None else weight.detach().to(rank.device) - before[name]
    return updates
