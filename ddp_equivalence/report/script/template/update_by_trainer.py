"""The change of the weights by the user's own trainer, on a rank."""

from __future__ import annotations

from torch import Tensor

from ddp_equivalence.case.batch import move
from ddp_equivalence.comparison.gradients import weights_of
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.template.placeholders import (
    BIG_BATCHES,
    SEED,
    SEED_DISTANCE,
    SHARDS,
    Gradients,
    model_at_start,
    step,
    take_examples,
)
from ddp_equivalence.report.script.template.start_from_seed import seed_all, whole_batch


def on_this_rank(rank: Rank) -> Gradients:
    """The change of the weights by the trainer on this rank; one call trains all steps."""
    model = model_at_start().to(rank.device)
    of_all_steps = [
        examples[index]
        for examples, indices in zip(BIG_BATCHES, SHARDS, strict=True)
        for index in indices[rank.rank]
    ]
    shard = take_examples(whole_batch(), of_all_steps)
    before = weights_of(dict(model.named_parameters()))
    seed_all(SEED + 1 + rank.rank * SEED_DISTANCE)
    trained = step(model, move(shard, rank.device), rank) or {}
    updates: dict[str, Tensor | None] = {}
    for name, weight in before.items():
        after = trained.get(name)
        updates[name] = None if after is None else after.detach().to(rank.device) - weight
    return updates
