"""``static_graph=True`` reduces in the first of two backward passes through one forward pass."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect, squares


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Two losses of one output, each with a backward pass of its own."""
    ddp = DistributedDataParallel(model, static_graph=True)
    loss = squares(ddp, batch)
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()


DEFECT = KnownDefect(
    name="static_graph_two_backwards",
    says="with static_graph=True, what a second backward pass adds stays on its own rank, and "
    "nothing is raised",
    step=step,
    outcome="different",
    cause="backward_after_reduction",
    upstream=("https://github.com/pytorch/pytorch/issues/80832",),
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="add the losses, and call backward once",
)
