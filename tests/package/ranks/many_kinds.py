"""A module with a global of every kind that a user's module may have, none of them changed."""

from __future__ import annotations

import argparse
import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import pathlib
import re
import sys
import threading
import types
import typing
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

LOG = logging.getLogger(__name__)
HANDLER = logging.StreamHandler()
PATTERN = re.compile("a+")
PARSER = argparse.ArgumentParser(prog="mine")
PARSER.add_argument("--lr", type=float, default=0.1, help="rate")
LOCK, LOCAL, EVENT = threading.Lock(), threading.local(), threading.Event()
GENERATOR = (number for number in range(3))
COUNT = itertools.count()
STREAM = sys.stdout
SENTINEL = object()
WORDS = {"a", "b", "c"}
FROZEN = frozenset({"a", "b", ("c", 1)})
BY_CLASS = {nn.Linear: 1, nn.Conv2d: F.relu}
LOOP: list[object] = [1]
LOOP.append(LOOP)
VIEW = types.MappingProxyType({"a": 1})
ORDERED = collections.OrderedDict(a=1, b=[2])
DEFAULT = collections.defaultdict(list, a=[1])
COUNTED = collections.Counter("hello")
QUEUE = collections.deque([1, 2], maxlen=3)
SPACE = types.SimpleNamespace(a=1, b=[1])
NAMESPACE = argparse.Namespace(a=1)
CONTEXT = contextvars.ContextVar("CONTEXT", default=1)
LIBRARY = ctypes.CDLL(None)
EITHER = int | None
ALIAS = dict[str, list[int]]
NAN, MINUS_ZERO, INFINITY = math.nan, -0.0, math.inf
PATH = pathlib.Path(__file__)
PART = functools.partial(operator.mul, 2)
SQUARE = lambda value: value * value  # noqa: E731
ARRAY = np.arange(12.0).reshape(3, 4)
OBJECTS = np.array([{"a": 1}, None], dtype=object)
RANDOM = np.random.default_rng(0)
TORCH_RANDOM = torch.Generator().manual_seed(0)
TENSOR = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
COMPLEX = torch.ones(2, dtype=torch.complex64).conj()
SPARSE = torch.eye(3).to_sparse()
DEVICE, DTYPE, SIZE = torch.device("cpu"), torch.float16, torch.Size([1, 2])
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
MODEL.register_forward_hook(lambda *_: None)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda epoch: 0.9**epoch)
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ARRAY_ROWS := torch.ones(4, 2)))
MEAN = MODEL.forward
ROWS = [(number, str(number), 0.5) for number in range(1000)]
TEXT = "long " * 1000
WEAK: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
WEAK[MODEL] = 1
REFERENCE = weakref.ref(MODEL)


class Colour(enum.Enum):
    RED = 1
    BLUE = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int = 1
    b: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Options:
    average: bool = True
    lock: typing.Any = dataclasses.field(default_factory=threading.Lock)


class Pair(typing.NamedTuple):
    first: int
    second: list[int]


class Base:
    instances: typing.ClassVar[list[Base]] = []

    @property
    def twice(self) -> int:
        return 2

    @functools.cached_property
    def thrice(self) -> int:
        return 3


class Registered(type):
    known: typing.ClassVar[dict[str, type]] = {}

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, object]) -> None:
        super().__init__(name, bases, body)
        Registered.known[name] = cls


class One(metaclass=Registered):
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = 1


class Hostile:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("never compare me")

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> str:
        raise RuntimeError("never pickle me")

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("never ask me")

    def __repr__(self) -> str:
        raise RuntimeError("never print me")


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(context: typing.Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(context: typing.Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Words(dict[str, int]):
    """A dict with attributes of its own."""


WORDS_BY_NAME = Words(a=1)
WORDS_BY_NAME.extra = [1]  # type: ignore[attr-defined]
ONE, HOSTILE, FROZEN_ONE, OPTIONS, PAIR = One(), Hostile(), Frozen(), Options(), Pair(1, [2])
pytree.register_pytree_node(Words, lambda words: ([], None), lambda values, _: Words())


@torch.library.custom_op("many_kinds::double", mutates_args=())
def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


@functools.lru_cache(maxsize=None)  # noqa: UP033
def cached(value: int) -> int:
    return value


@functools.singledispatch
def dispatched(value: object) -> str:
    return "object"


@dispatched.register
def _(value: int) -> str:
    return "int"


def __getattr__(name: str) -> object:
    raise RuntimeError(f"never ask for {name}")


def right() -> bool:
    cached(1)
    Scale.apply(torch.ones(1))  # type: ignore[no-untyped-call]
    return dispatched(1) == "int"
