"""A user's module with every kind of setting, and a step that uses it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ddp_equivalence import Rank, check
from tests.package.own_cases import loss, own_case

TRAIN = '''
"""A training module as a user writes it, with its settings in every usual place."""

import logging
import os
import re
import sys
import threading
import argparse

import torch
import torch.distributed as dist

AVERAGE = True
EXTRA = None
STEP = 0
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
PLACES = {"world": int(os.environ.get("WORLD_SIZE", "1")), "average": True}
SETTINGS = {"average": True, "inner": {"average": True}}
FACTORS = [1.0]
SKIPPED = set()
LOCK = threading.Lock()
LOG = logging.getLogger(__name__)
PATTERN = re.compile("a+")
PARSER = argparse.ArgumentParser()
MISSING = object()
WEIGHT = torch.ones(1)
HANDLE = sys.stderr


class Config:
    average = True

    def wanted(self):
        return True


class Options:
    def __init__(self):
        self.average = True
        self.lock = threading.Lock()


class Raising:
    def __eq__(self, other):
        raise RuntimeError("never compare me")

    __hash__ = None

    def __reduce__(self):
        raise RuntimeError("never pickle me")


RAISING = Raising()
options = Options()
default_options = options


def divide(gradient, world):
    gradient /= world


def averages(chosen=options, *, also=True):
    values = [
        AVERAGE, SETTINGS["average"], SETTINGS["inner"]["average"], Config.average,
        Config().wanted(), options.average, chosen.average, default_options.average, also,
        "average" not in SKIPPED, FACTORS == [1.0], bool(WEIGHT == 1), EXTRA is None,
        PLACES["average"],
    ]
    assert WORLD_SIZE == dist.get_world_size() == PLACES["world"]
    return all(values)


def counting():
    count = 0

    def count_up():
        nonlocal count
        count += 1
        return count

    return count_up


count_up = counting()


def reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if averages():
            divide(parameter.grad, dist.get_world_size())


'''


SAME, SUMMED = ("same", None), ("different", "sum_not_mean")


def step_with(module: ModuleType) -> Callable[..., None]:
    def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(model, shard).backward()
        module.reduce_gradients(model)

    return step


def outcome(step: Callable[..., Any], **options: Any) -> tuple[str, str | None]:
    verdict = check(own_case(), step, **options)
    return verdict.outcome, verdict.cause
