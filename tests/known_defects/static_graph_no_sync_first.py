"""``static_graph=True`` fails if the first backward pass runs under ``no_sync``."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect, halves, squares


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Accumulate over two micro-batches, as DDP's documentation shows."""
    ddp = DistributedDataParallel(model, static_graph=True)
    first, second = halves(batch)
    with ddp.no_sync():
        (squares(ddp, first) / 2).backward()
    (squares(ddp, second) / 2).backward()


DEFECT = KnownDefect(
    name="static_graph_no_sync_first",
    says="with static_graph=True, a first backward under no_sync ends in an internal assertion",
    step=step,
    outcome="unknown",
    words="expect_autograd_hooks_ INTERNAL ASSERT FAILED",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/143580",
        "https://github.com/huggingface/accelerate/issues/3679",
        "https://github.com/pytorch/pytorch/pull/187732",
    ),
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="make the first step without no_sync; or leave static_graph out",
)
