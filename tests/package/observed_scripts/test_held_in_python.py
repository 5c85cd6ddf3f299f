"""What is noted of a script's numbers and generators, and what is left out."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from ddp_equivalence.observed_scripts.in_script.kept_tensors import MOST_PARTS, held_in_python


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
    assert f"trainer.rows[{len(trainer.rows) - 1}]" not in held
    assert sum(name.startswith("trainer.rows[") for name in held) == MOST_PARTS
    assert not [name for name in held if "_modules" in name]
