"""An ocean model's subgrid term from a convolutional network, on a domain cut into slabs.

The basin is periodic. A rank owns a slab of rows and gets some rows of its neighbours with it,
so that nothing has to be exchanged within the network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


@dataclass(frozen=True)
class Domain:
    rows: int = 16
    columns: int = 6
    halo: int = 1  # rows of each neighbour
    channels: int = 2

    def slab(self, rank: Rank) -> slice:
        height = self.rows // rank.world_size
        return slice(rank.rank * height, (rank.rank + 1) * height)


DOMAIN = Domain()


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, padding_mode="circular")


def build_model() -> nn.Module:
    return nn.Sequential(conv(DOMAIN.channels, 5), nn.Tanh(), conv(5, 1))


def snapshots(generator: torch.Generator) -> dict[str, Tensor]:
    size = (DOMAIN.rows, DOMAIN.columns)
    return {
        "flow": torch.randn(3, DOMAIN.channels, *size, generator=generator),
        "stress": torch.randn(3, 1, *size, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["flow"]), batch["stress"])


# Every rank gets the whole basin ("own") and cuts its slab out.
case = Case(model=build_model, batch=snapshots, loss=loss, layout="2x2", shards="own")


def with_halo(field: Tensor, slab: slice, halo: int) -> Tensor:
    rows = torch.arange(slab.start - halo, slab.stop + halo) % field.shape[2]
    return field.index_select(2, rows)


def without_halo(field: Tensor, halo: int) -> Tensor:
    return field[:, :, halo : field.shape[2] - halo]


def slab_error(model: nn.Module, batch: dict[str, Tensor], slab: slice) -> Tensor:
    predicted = model(with_halo(batch["flow"], slab, DOMAIN.halo))
    predicted = without_halo(predicted, DOMAIN.halo)
    return (predicted - batch["stress"][:, :, slab]).square().sum()


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    cells = batch["stress"].numel()
    (slab_error(model, batch, DOMAIN.slab(rank)) / cells).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
