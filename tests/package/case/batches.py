"""Batches of many kinds with the same 12 rows and targets, and losses that read them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.package.own_cases import make_batch

N = 12
NAMES = [f"row {place}" for place in range(N)]


@dataclass
class Rows:
    rows: Tensor
    targets: Tensor
    unit: str = "cm"


@dataclass(frozen=True, slots=True)
class FrozenRows:
    rows: Tensor
    targets: Tensor
    kind: str = field(default="frozen", init=False)


class NamedRows(NamedTuple):
    rows: Tensor
    targets: Tensor


class OwnDict(dict[str, Tensor]):
    pass


class Encoding(UserDict[str, Tensor]):
    """As transformers' BatchEncoding: a UserDict with ``to``, and attributes of its own."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        super().__init__(data)
        self.is_fast = True

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: leaf.to(device) for name, leaf in self.data.items()}
        return self


class Holder:
    """Any object with tensors in its attributes."""

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.parts = {"rows": rows}
        self.targets = targets

    @property
    def rows(self) -> Tensor:
        return self.parts["rows"]


class Slots:
    __slots__ = ("rows", "targets")

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.rows, self.targets = rows, targets


class Registered:
    """A type that its user has registered with torch's pytree, without names for its keys."""

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.rows, self.targets = rows, targets


pytree.register_pytree_node(
    Registered, lambda one: ([one.rows, one.targets], None), lambda leaves, _: Registered(*leaves)
)


class Circle:
    """It holds tensors, and itself."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.again = rows, self


class Pair(tuple[Tensor, ...]):
    """A tuple of its own type, which nobody knows how to make anew."""

    __slots__ = ()


KINDS: dict[str, Callable[..., Any]] = {
    "dataclass": Rows,
    "frozen dataclass with slots": FrozenRows,
    "named tuple": NamedRows,
    "ordered dict": OrderedDict,
    "dict of one's own": lambda **leaves: OwnDict(leaves),
    "user dict": lambda **leaves: Encoding(leaves),
    "object": Holder,
    "registered": Registered,
    "slots": Slots,
    "tuple": lambda rows, targets: (rows, targets),
    "list": lambda rows, targets: [rows, targets],
    "deque": lambda rows, targets: deque([rows, targets]),
    "deeply nested": lambda rows, targets: {"a": [{"b": (Rows(rows, targets),)}], "none": None},
}


def rows_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """The rows and targets of a batch of any of these kinds."""
    if isinstance(batch, dict) and "a" in batch:
        batch = batch["a"][0]["b"][0]
    if isinstance(batch, list | tuple | deque):
        return batch[0], batch[1]
    if isinstance(batch, dict | UserDict):
        return batch["rows"], batch["targets"]
    return batch.rows, batch.targets


def loss_of_any_kind(model: nn.Module, batch: Any) -> Tensor:
    rows, targets = rows_and_targets(batch)
    return F.mse_loss(model(rows), targets)


class BatchOfKind:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, generator: torch.Generator) -> Any:
        return KINDS[self.kind](**make_batch(generator))


def with_more(**more: Any) -> Callable[[torch.Generator], Any]:
    """A builder of rows and targets, and more leaves."""

    def build(generator: torch.Generator) -> Any:
        return make_batch(generator) | more

    return build


def examples_along_dim_1(generator: torch.Generator) -> Any:
    return {name: leaf.T.contiguous() for name, leaf in make_batch(generator).items()}


def loss_along_dim_1(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["rows"].T), batch["targets"].T)


def images_of_many_sizes(generator: torch.Generator) -> Any:
    """One image of its own size for each example."""
    sizes = torch.randint(2, 6, (N, 2), generator=generator).tolist()
    images = [torch.randn(5, *size, generator=generator) for size in sizes]
    return {"images": images, "targets": torch.randn(N, 3, generator=generator), "names": NAMES}


def loss_of_images(model: nn.Module, batch: Any) -> Tensor:
    assert len(batch["images"]) == len(batch["targets"]) == len(batch["names"])
    rows = torch.stack([image.mean((1, 2)) for image in batch["images"]])
    return F.mse_loss(model(rows), batch["targets"])


def lengths_of_names(generator: torch.Generator) -> Any:
    """No tensor holds the examples: the loss makes tensors of the names and of an array."""
    numbers = torch.randn(N, 5, generator=generator).numpy()
    return {"names": NAMES, "numbers": numbers, "scale": torch.tensor([0.5, 2.0, 1.0])}


def loss_of_names(model: nn.Module, batch: Any) -> Tensor:
    weight = next(model.parameters())
    rows = torch.from_numpy(np.asarray(batch["numbers"])).to(weight)
    wanted = torch.tensor([len(name) for name in batch["names"]]).to(weight)
    value: Tensor = ((model(rows) * batch["scale"]).sum(1) - wanted).square().mean()
    return value
