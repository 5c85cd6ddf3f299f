"""Adapters in a frozen network. A second copy is made on the meta device, sharded, and only then given storage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from ddp_equivalence import Case

INPUTS, WIDTH, RANK, CLASSES, MICRO = 7, 11, 3, 5, 2


class Adapted(nn.Module):
    """A frozen layer, and a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(x) + self.up(self.down(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["rows"]), batch["labels"])


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(10, INPUTS, generator=generator),
        "labels": torch.randint(CLASSES, (10,), generator=generator),
    }


def sharded_copy(model: Network) -> Network:
    with torch.device("meta"):
        copy = Network()
    for layer in copy.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(copy)
    # The dtype before the storage: the meta tensors are float32.
    copy.to(next(model.parameters()).dtype).to_empty(device="cpu")
    whole = model.state_dict()
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            values = distribute_tensor(whole[name], parameter.device_mesh, parameter.placements)
            parameter.copy_(values)
    return copy


def pieces(batch: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], float, bool]]:
    """Micro-batches, their part of the examples, and whether it is the last one."""
    count = len(batch["rows"])
    for start in range(0, count, MICRO):
        stop = min(start + MICRO, count)
        part = {name: value[start:stop] for name, value in batch.items()}
        yield part, (stop - start) / count, stop == count


def accumulate(model: FSDPModule, batch: dict[str, Tensor]) -> None:
    for part, weight, last in pieces(batch):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (weight * loss(model, part)).backward()


def step(model, shard, rank):
    copy = sharded_copy(model)
    accumulate(copy, shard)
    found = {}
    for name, parameter in copy.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter.grad, DTensor)
            found[name] = parameter.grad.full_tensor()
    return found


case = Case(model=Network, batch=rows, loss=loss, layout="1x2")
