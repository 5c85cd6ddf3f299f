"""``static_graph=True`` reduces nothing after a backward pass that leaves a parameter out."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect


class TwoHeads(nn.Module):
    """The second head can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, inputs: Tensor, both: bool = True) -> Tensor:
        """The sum of the heads."""
        out: Tensor = self.first(inputs)
        return out + self.second(inputs) if both else out


def both_and_one(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of the losses with both heads, and with one."""
    losses = [mse_loss(model(batch["inputs"], both), batch["targets"]) for both in (True, False)]
    return (losses[0] + losses[1]) / 2


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """The first backward pass goes through both heads, the second through one."""
    ddp = DistributedDataParallel(model, static_graph=True)
    for both in (True, False):
        (mse_loss(ddp(batch["inputs"], both), batch["targets"]) / 2).backward()


DEFECT = KnownDefect(
    name="static_graph_head_left_out",
    says="with static_graph=True, what a backward pass adds stays on its own rank if it leaves out "
    "a parameter that the first one used, and nothing is raised (the reverse raises an error)",
    step=step,
    model=TwoHeads,
    loss=both_and_one,
    outcome="different",
    cause="backward_after_reduction",
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="use find_unused_parameters=True and leave static_graph out; or use all parameters in "
    "every backward pass",
)
