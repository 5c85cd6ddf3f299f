"""Which tensors, names and numbers of a script are recorded, and how they are copied."""

from __future__ import annotations

import errno
import linecache
import math
import os
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.observed_scripts.in_script import kept_tensors
from ddp_equivalence.observed_scripts.in_script.kept_tensors import (
    LARGE,
    MOST_ELEMENTS,
    MOST_PARTS,
    ModuleNames,
    class_that_keeps,
    held_in_python,
    kept,
    mark_of,
    named_tensors,
    whole,
)
from ddp_equivalence.observed_scripts.seen_in_record import line_that_assigns

# --- names of tensors and modules


class Centers(nn.Module):
    """Keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.center = torch.zeros(2)


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in named_tensors(module)]


def test_plain_tensors_are_recorded_but_neither_views_nor_what_has_a_gradient() -> None:
    module = Centers()
    assert names(nn.Sequential(module)) == [
        *("0.count", "0.center", "0.layer.weight", "0.layer.bias"),
    ]
    module.center = module.layer(torch.ones(2))
    assert "center" not in names(module)
    flat = nn.Parameter(torch.zeros(4)) * 1.0
    module.center = flat.split(2)[0]  # as FSDP makes them
    flat.mul_(2.0)
    assert "center" not in names(module)


def test_names_do_not_depend_on_wrappers() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain = nn.ModuleDict({"module": inner})  # an attribute that is called like a wrapper's
    assert {"module.0.weight", "module.1.running_mean"} <= set(names(plain))
    assert names(nn.ModuleDict({"module": DataParallel(inner)})) == names(plain)
    assert names(DataParallel(plain)) == names(plain)


def test_modules_of_one_class_are_told_apart_by_their_first_call() -> None:
    known = ModuleNames()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert known.of(first) == "Linear"
    assert known.of(DataParallel(second)) == known.of(second) == "Linear#1"
    learned = [name for name, _ in known.learn_parameters("Linear")]
    assert learned == ["Linear:weight", "Linear:bias"]
    assert known.learn_parameters("Linear") == []
    assert known.of_parameter(first.weight) == "Linear:weight"
    assert known.of_parameter(second.weight) is None


# --- marks of what modules return


class Refuses(TorchDispatchMode):
    """Lets no operation of torch run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def test_a_mark_depends_on_values_and_on_their_order_and_is_seen_by_no_mode() -> None:
    values = torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
    assert mark_of({"out": values}) == mark_of([values.clone()])
    others = [values.flip(0), -values, (values, values[:1])]
    assert mark_of(values) not in map(mark_of, others)
    large = torch.ones(3 * MOST_ELEMENTS + 1, dtype=torch.bfloat16)
    changed = large.clone()
    changed[: MOST_ELEMENTS // 2] = 2
    assert mark_of(changed) != mark_of(large)
    for one in (None, 3.5, torch.arange(3), torch.ones(0), torch.eye(3).to_sparse()):
        assert math.isnan(mark_of(one))
    values = values.detach()
    with Refuses():  # type: ignore[no-untyped-call]
        assert not math.isnan(mark_of(values))


# --- numbers and generators in Python


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self._means = 9, {"rows": 1.5, (1, 2): 2.5}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = Norm(), 3.0


class Balancer:
    def __init__(self) -> None:
        self.average = {"cls": 0.5}
        self.last = deque([1.0, 2.0])
        self.generator = torch.Generator()


class Trainer:
    def __init__(self) -> None:
        self.balancer = Balancer()
        self.rows = list(range(100))


def test_numbers_are_named_as_the_script_would_write_them() -> None:
    trainer, words = Trainer(), {"lr": 0.25}
    held = held_in_python(Model())
    assert held["Model.scale"] == "3"
    assert held["Model.norm.count"] == "9"
    assert held["Model.norm._means['rows']"] == "1.5"
    assert held["trainer.balancer.average['cls']"] == "0.5"
    assert held["trainer.balancer.last[1]"] == "2"
    assert held["trainer.balancer.generator"].startswith("state ")
    assert held["words['lr']"] == str(words["lr"])
    assert sum(name.startswith("trainer.rows[") for name in held) == MOST_PARTS
    assert len(trainer.rows) > MOST_PARTS
    assert not [name for name in held if "_modules" in name]


# --- copies of large tensors


def no_room(*arguments: int) -> None:
    """Stands for a disk that is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_copy_is_a_copy_and_leaves_no_file(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_tensors, "MOST_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tensor = torch.randn(3, LARGE // 2).to(dtype)
    copy, before = kept(tensor), tensor.clone()
    tensor.zero_()
    assert torch.equal(copy, before)
    assert torch.equal(whole(copy, divided_by=2.0), before / 2)
    monkeypatch.setattr("os.posix_fallocate", no_room)
    assert torch.equal(kept(tensor), tensor), "it lies in memory"
    assert list(tmp_path.iterdir()) == []


def test_large_copies_lie_in_memory_as_long_as_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Mock()
    monkeypatch.setattr("os.posix_fallocate", files)
    monkeypatch.setattr(kept_tensors, "MOST_IN_MEMORY", 8 * LARGE)
    first = kept(torch.zeros(LARGE))  # of 4 bytes an element
    kept(torch.zeros(LARGE))  # is freed at once
    second = kept(torch.zeros(LARGE))
    assert files.call_count == 0
    third = kept(torch.ones(LARGE))
    assert files.call_count == 1
    assert [float(one.sum()) for one in (first, second, third)] == [0, 0, LARGE]


# --- the line that gives a buffer its value


class Memory(nn.Module):
    """Keeps what it has seen in buffers."""

    assigned: Tensor
    copied: Tensor
    written: Tensor
    added: Tensor
    twice: Tensor
    never: Tensor
    first: Tensor
    second: Tensor
    third: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in Memory.__annotations__:
            self.register_buffer(name, torch.zeros(4))

    def forward(self, inputs: Tensor) -> Any:
        self.assigned = inputs
        self.copied.copy_(inputs)
        self.written[:2] = inputs[:2]
        self.added += inputs
        (self.first, (self.second, *_)) = inputs, (inputs, inputs)
        self.third.data.fill_(1.0)
        self.twice = inputs
        self.twice = self.twice + self.never.abs()
        return self.twice


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("assigned", "self.assigned = inputs"),
        ("copied", "self.copied.copy_(inputs)"),
        ("written", "self.written[:2] = inputs[:2]"),
        ("added", "self.added += inputs"),
        ("first", "(self.first, (self.second, *_)) = inputs, (inputs, inputs)"),
        ("second", "(self.first, (self.second, *_)) = inputs, (inputs, inputs)"),
        ("third", "self.third.data.fill_(1.0)"),
    ],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_one_line_that_writes_a_buffer_is_found(name: str, line: str, depth: int) -> None:
    module = nn.Sequential(Memory()) if depth else Memory()
    kept_by = class_that_keeps(module, f"0.{name}" if depth else name)
    assert kept_by is not None
    place = line_that_assigns(kept_by.file, name, kept_by.function)
    assert place is not None
    assert (place.file, place.function) == (__file__, "forward")
    assert linecache.getline(place.file, place.number).strip() == line


def test_several_lines_are_not_guessed_and_libraries_not_named() -> None:
    for name in ("twice", "never", "unknown"):
        assert line_that_assigns(__file__, name, "Memory") is None
    for buffer in ("running_mean", "inside.a.wrapper"):
        assert class_that_keeps(nn.BatchNorm1d(2), buffer) is None
