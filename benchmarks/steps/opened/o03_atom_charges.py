"""Partial charges of atoms: molecules of different sizes, padded to the largest one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

LARGEST, ELEMENTS, WIDTH = 7, 5, 8


class ChargeNet(nn.Module):
    """Two rounds of messages along distance-weighted edges."""

    def __init__(self) -> None:
        super().__init__()
        self.element = nn.Embedding(ELEMENTS, WIDTH)
        self.message = nn.Linear(WIDTH, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)
        self.charge = nn.Linear(WIDTH, 1)

    def forward(self, elements: Tensor, positions: Tensor, real: Tensor) -> Tensor:
        distance = torch.cdist(positions, positions)
        edges = torch.exp(-distance) * real[:, None] * real[:, :, None]
        state = self.element(elements)
        for _ in range(2):
            incoming = edges @ torch.relu(self.message(state))
            state = self.update(incoming.flatten(0, 1), state.flatten(0, 1)).view_as(state)
        return self.charge(state).squeeze(-1)


def molecules(generator: torch.Generator) -> dict[str, Tensor]:
    sizes = torch.tensor([2, 3, 2, 3, 4, 6, 7, 7, 5, 7, 6, 7])
    real = (torch.arange(LARGEST) < sizes[:, None]).double()
    shape = (len(sizes), LARGEST)
    return {
        "elements": torch.randint(0, ELEMENTS, shape, generator=generator),
        "positions": torch.randn(*shape, 3, generator=generator),
        "real": real,
        "charges": torch.randn(shape, generator=generator),
    }


def squared_errors(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    predicted = model(batch["elements"], batch["positions"], batch["real"])
    return (predicted - batch["charges"]).square() * batch["real"]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return squared_errors(model, batch).sum() / batch["real"].sum()


class DataParallel:
    """Context manager: what backward leaves in the model is averaged on exit."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.world = dist.get_world_size()

    def __enter__(self) -> "DataParallel":
        self.model.zero_grad()
        return self

    def mean_count(self, mask: Tensor) -> Tensor:
        """How many entries are real, per rank on average."""
        count = mask.sum()
        return count

    def __exit__(self, *exception) -> None:
        if exception[0] is not None:
            return
        flat = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for parameter in self.model.parameters():
            piece = flat[offset : offset + parameter.numel()]
            parameter.grad.copy_(piece.view_as(parameter))
            offset += parameter.numel()


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    with DataParallel(model) as parallel:
        total = squared_errors(model, shard).sum()
        (total / parallel.mean_count(shard["real"])).backward()


case = Case(model=ChargeNet, batch=molecules, loss=loss, layout="1x2")
