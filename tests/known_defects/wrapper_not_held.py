"""DDP reduces nothing, and raises nothing, if nobody holds the wrapper until backward."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect, squares


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """The wrapper is freed when its forward pass has returned, and its reducer with it."""
    squares(DistributedDataParallel(model), batch).backward()


DEFECT = KnownDefect(
    name="wrapper_not_held",
    says="a DDP wrapper that is freed before backward reduces nothing, and nothing is raised",
    step=step,
    outcome="different",
    cause="wrapper_dropped",
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="keep the wrapper in a variable until backward has run",
)
