"""``static_graph=True`` reduces nothing if torch cannot look into the model's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect


@dataclass
class Output:
    """As many libraries return it."""

    values: Tensor


class Model(nn.Module):
    """Returns its outputs in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Output:
        """The outputs."""
        return Output(self.layer(inputs))


def loss(model: nn.Module, batch: Batch) -> Any:
    """The mean squared error."""
    return mse_loss(model(batch["inputs"]).values, batch["targets"])


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Plain DDP, but for the flag."""
    ddp = DistributedDataParallel(model, static_graph=True)
    loss(ddp, batch).backward()


DEFECT = KnownDefect(
    name="static_graph_opaque_output",
    says="with static_graph=True, DDP reduces nothing in the first step if the model returns an "
    "object in which torch finds no tensors",
    step=step,
    model=Model,
    loss=loss,
    outcome="different",
    cause="no_all_reduce",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/106690",
        "https://github.com/huggingface/transformers/issues/25357",
    ),
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="return tensors, tuples or dicts; or leave static_graph out",
)
