"""DDP reduces nothing if the last micro-batch leaves out a parameter that another one used."""

from __future__ import annotations

from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect
from tests.known_defects.static_graph_head_left_out import TwoHeads, both_and_one


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Two backward passes that accumulate, of which the last goes through one head only."""
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        (mse_loss(ddp(batch["inputs"]), batch["targets"]) / 2).backward()
    (mse_loss(ddp(batch["inputs"], both=False), batch["targets"]) / 2).backward()


DEFECT = KnownDefect(
    name="unused_parameter_after_no_sync",
    says="without find_unused_parameters, DDP reduces nothing if the last micro-batch leaves out a "
    "parameter; the optimizer steps with gradients of its own rank, and only the next forward pass "
    "raises an error",
    step=step,
    model=TwoHeads,
    loss=both_and_one,
    outcome="different",
    cause="no_all_reduce",
    upstream=("https://github.com/pytorch/pytorch/issues/69031",),
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="use find_unused_parameters=True, or let every micro-batch use all parameters",
)
