"""What chose that gradients are reduced, and what was written instead of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case, Rank, check

pytestmark = pytest.mark.self_check

Rows = dict[str, torch.Tensor]


def make(generator: torch.Generator) -> Rows:
    rows = torch.randn(8, 3, 5, 5, generator=generator, dtype=torch.float64)
    return {"rows": rows, "part": torch.arange(8) // 3}


class Parts(nn.Module):
    """Each example goes through one of three convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(3, 4, 3) for _ in range(3))

    def forward(self, rows: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        found = [self.parts[int(k)](row[None]) for row, k in zip(rows, part, strict=True)]
        return torch.cat(found)


def convolutions() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 2))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def squares(model: nn.Module, batch: Rows) -> torch.Tensor:
    return model(batch["rows"]).square().mean()  # type: ignore[no-any-return]


def squares_of_parts(model: nn.Module, batch: Rows) -> torch.Tensor:
    return model(batch["rows"], batch["part"]).square().mean()  # type: ignore[no-any-return]


def used_everywhere(model: nn.Module) -> list[str]:
    own = [name for name, p in model.named_parameters() if p.grad is not None]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    return sorted(set(of_all[0]).intersection(*of_all[1:]))


def only_what_all_use(model: nn.Module, shard: Rows, rank: Rank) -> None:
    squares_of_parts(model, shard).backward()
    named = dict(model.named_parameters())
    total = torch.zeros(1)
    dist.all_reduce(total)
    for name in used_everywhere(model):
        gradient = named[name].grad
        assert gradient is not None
        dist.all_reduce(gradient)
        gradient /= rank.world_size


def into_flattened(model: nn.Module, shard: Rows, rank: Rank) -> None:
    squares(model, shard).backward()
    for p in model.parameters():
        assert p.grad is not None
        copied = p.grad.clone()
        dist.all_reduce(copied)
        p.grad.flatten().copy_(copied.flatten() / rank.world_size)


class Queue:
    """Reduces what was added in pieces of two, and the rest at the end."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.reduced = 0

    def add(self, parameter: Any) -> None:
        self.waiting.append(parameter)
        if len(self.waiting) == 2:
            self.send()

    def send(self) -> None:
        for parameter in self.waiting:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.reduced += len(self.waiting)
        self.waiting.clear()

    def end(self) -> None:
        if self.reduced:
            return
        self.send()


def returns_before_the_rest(model: nn.Module, shard: Rows, rank: Rank) -> None:
    squares(model, shard).backward()
    queue = Queue()
    for parameter in list(model.parameters())[:3]:
        queue.add(parameter)
    queue.add(next(reversed(list(model.parameters())))) if not queue.waiting else None
    queue.end()


@pytest.mark.parametrize(
    ("step", "model", "loss", "line", "note"),
    [
        (into_flattened, convolutions, squares, "p.grad.flatten().copy_(", "flatten() returns"),
        (returns_before_the_rest, convolutions, squares, "return", "calls send()"),
        (only_what_all_use, Parts, squares_of_parts, "return sorted(set(", "goes through"),
    ],
)
def test_the_line_that_kept_gradients_from_being_reduced_is_shown(
    step: Any, model: Any, loss: Any, line: str, note: str
) -> None:
    case = Case(model=model, batch=make, loss=loss, layout="1x2", dtype=torch.float64)
    verdict = check(case, step)
    assert verdict.outcome == "different", verdict
    assert line in str(verdict)
    assert note in str(verdict)
