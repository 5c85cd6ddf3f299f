"""Notices random numbers and shuffles, and gives recorded numbers to another run."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DistributedSampler

from ddp_equivalence.measurement.calls import CodeLine, NotPlain, is_users, lines_of, plain
from ddp_equivalence.measurement.lines import code_of
from ddp_equivalence.ranks.users_line import counts_as_torch

# Records the random numbers that a computation draws, and gives recorded ones to another.
#
# Every operation of torch that draws has one tag, whatever function, module or generator asked
# for it. The functions of Python's ``random`` and of ``numpy.random`` that share one generator
# are wrapped. Numbers that other objects draw are not seen. Source:
# pytorch.org/docs/stable/notes/extending.html, "Extending all torch API with Modes".

MOST_RECORDED_DRAWS = 20_000
MOST_BYTES = 48 * 1024**2
"""If more is drawn, nothing of it can be given to another computation."""

RANDOM = torch.Tag.nondeterministic_seeded

_WITHOUT_A_DRAW = ("empty_like", "native_dropout_backward")
"""Operations with torch's tag for those that draw, which draw nothing."""

KEPT = "bernoulli"
"""The name of every draw of zeros and ones. A GPU draws the mask of dropout by another operation
than the CPU, which means the same.
"""

_DROPOUT_OPERATIONS = ("native_dropout", "_fused_dropout")
_MODULES: tuple[tuple[Any, str, str], ...] = (
    (random, "random", "random"),
    (np.random, "random_sample", "numpy"),
)
"""A module, a function of it that draws, and what its draws are called."""

_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "shuffle")


@dataclass(frozen=True)
class Draw:
    """One draw. ``name``: of the operation, without what differs between devices. ``value``: what
    it gave, on the CPU; None if this is no tensor or number. ``line``: the innermost line outside
    torch and this package. ``piece``: how many backward passes had ended before.
    """

    name: str
    value: Tensor | None
    line: CodeLine | None
    piece: int = 0


def draws_numbers(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if an operation draws random numbers. An attention without dropout does not."""
    if RANDOM not in function.tags or name_of_operation(function) in _WITHOUT_A_DRAW:
        return False
    given = {one.name: one.default_value for one in function._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | dict(kwargs)
    of_dropout = "p" if "dropout" in name_of_operation(function) else ""
    probability = next((given[n] for n in ("dropout_p", "dropout", of_dropout) if n in given), 1.0)
    return float(probability or 0.0) > 0.0 and given.get("train") is not False


def name_of_operation(function: Any) -> str:
    """Torch's name of an operation, without those of its namespace and its overload."""
    return str(function.name().partition("::")[2].partition(".")[0])


class _Draws(TorchDispatchMode):
    """Sees every draw inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the draws inside the block."""
        functions = list(_functions_that_draw())
        try:
            for module, name, function, prefix in functions:
                setattr(module, name, self._wrapped(f"{prefix}.{name}", function))
            with self:
                yield
        finally:
            for module, name, function, _ in functions:
                setattr(module, name, function)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if draws_numbers(function, args, kwargs or {}):
            name = name_of_operation(function)
            try:
                if name in _DROPOUT_OPERATIONS:
                    self._drew(KEPT, result[1])
                    self._dropped(args[0], args[1], *result)
                else:
                    self._drew(name.rstrip("_"), result)
            except NotPlain:
                self._lost(name)
        return result

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def drawing(*arguments: Any, **named: Any) -> Any:
            return self._number(name, function(*arguments, **named))

        return drawing

    def _drew(self, name: str, result: object) -> None:
        raise NotImplementedError

    def _dropped(self, given: Tensor, rate: float, output: Tensor, mask: Tensor) -> None:
        """Called after the mask of a dropout was drawn."""

    def _number(self, name: str, result: Any) -> Any:
        raise NotImplementedError

    def _lost(self, name: str) -> None:
        raise NotImplementedError


class DrawLog(_Draws):
    """Records the draws. ``piece()``: how many backward passes have ended."""

    def __init__(self, piece: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self._piece = piece
        self._bytes = 0
        self.draws: list[Draw] = []
        self.complete = True

    def _drew(self, name: str, result: object) -> None:
        self._note(name, plain(result) if isinstance(result, Tensor) else None)

    def _number(self, name: str, result: Any) -> Any:
        self._note(name, _as_tensor(result))
        return result

    def _lost(self, name: str) -> None:
        self._note(name, None)

    def _note(self, name: str, value: Tensor | None) -> None:
        if not self.complete:
            return
        if value is not None:
            kind = torch.bool if name == KEPT else value.dtype
            value = value.detach().to("cpu", kind, copy=True)
            self._bytes += value.nbytes
        _, line = lines_of(sys._getframe(3))
        self.draws.append(Draw(name, value, line, self._piece()))
        if len(self.draws) >= MOST_RECORDED_DRAWS or self._bytes > MOST_BYTES:
            self.complete = False


class DrawReplay(_Draws):
    """Gives these draws to what runs inside the block, in their order, whatever it draws itself.

    ``failed``: it drew something else than what was recorded. Ask ``complete`` afterwards.
    """

    def __init__(self, draws: Sequence[Draw]) -> None:
        super().__init__()
        self._left = deque(draws)
        self.failed = False

    @property
    def complete(self) -> bool:
        """True if every draw was given, and none was missing."""
        return not self.failed and not self._left

    def _drew(self, name: str, result: object) -> None:
        value = self._next(name)
        if value is None or not isinstance(result, Tensor) or result.shape != value.shape:
            self.failed = True
        else:
            result.copy_(value)

    def _dropped(self, given: Tensor, rate: float, output: Tensor, mask: Tensor) -> None:
        output.copy_(given * mask / (1 - rate) if rate < 1 else given * 0)

    def _number(self, name: str, result: Any) -> Any:
        value, own = self._next(name), _as_tensor(result)
        if value is None or own is None or own.shape != value.shape:
            self.failed = True
            return result
        if isinstance(result, np.ndarray):
            return value.numpy().astype(result.dtype)
        number = value.tolist()
        return result.dtype.type(number) if isinstance(result, np.generic) else number

    def _lost(self, name: str) -> None:
        self.failed = True

    def _next(self, name: str) -> Tensor | None:
        if not self._left or self._left[0].name != name:
            self.failed = True
            return None
        return self._left.popleft().value


def _functions_that_draw() -> Iterator[tuple[Any, str, Callable[..., Any], str]]:
    """The functions of Python and numpy that share a generator: module, name, function, prefix."""
    for module, known, prefix in _MODULES:
        owner = getattr(module, known).__self__
        for name, function in list(vars(module).items()):
            if getattr(function, "__self__", None) is owner and name not in _NO_DRAWS:
                yield module, name, function, prefix


def _as_tensor(result: object) -> Tensor | None:
    """A number, array or list of numbers as a tensor; None for anything else."""
    try:
        found = torch.as_tensor(np.asarray(result))
    except (TypeError, ValueError):
        return None
    return found


# The modules and functions of torch that draw random numbers or couple the examples of a batch.


def _trains(frame: FrameType) -> bool:
    return bool(frame.f_locals["self"].training)


def _drops(frame: FrameType) -> bool:
    module = frame.f_locals["self"]
    return bool(module.training and getattr(module, "p", getattr(module, "dropout", 0)) > 0)


def _called_by_user(frame: FrameType) -> bool:
    caller = frame.f_back
    is_called = caller is not None and is_users(caller.f_code.co_filename)
    return is_called and bool(frame.f_locals.get("training", True))


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
_DROPOUT_MODULES = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.FeatureAlphaDropout, nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU),
)
_FUNCTIONS = (
    *(F.batch_norm, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    *(F.alpha_dropout, F.feature_alpha_dropout),
)


RANDOM_AND_COUPLING: dict[CodeType, Callable[[FrameType], bool]] = {
    **{code_of(function): _called_by_user for function in _FUNCTIONS},
    **{code_of(kind.forward): _trains for kind in _NORMS},
    **{code_of(kind.forward): _drops for kind in _DROPOUT_MODULES},
}
"""The code of each -> whether a call, given by its frame, does so."""


# Notices where a step shuffles: torch.randperm, random.shuffle and DistributedSampler.

OnShuffle = Callable[[FrameType, str, float | None], object]
"""Is told of a shuffle: the frame of the call, what shuffles, and the seed, if it was given one."""


def shuffle_handlers(on_shuffle: OnShuffle) -> dict[Any, Callable[[FrameType], object]]:
    """The functions that shuffle and are written in Python, and what to do at their calls."""

    def of_sampler(frame: FrameType) -> None:
        seed = frame.f_locals.get("seed")
        if frame.f_locals.get("shuffle"):
            number = float(seed) if isinstance(seed, int) else None
            on_shuffle(frame, DistributedSampler.__name__, number)

    return {
        random.Random.shuffle: lambda frame: on_shuffle(frame, "shuffle", None),
        DistributedSampler.__init__: of_sampler,
    }


@contextmanager
def randperm_recorded(on_shuffle: OnShuffle) -> Iterator[None]:
    """Inside the block, ``torch.randperm`` is noticed. It is not written in Python."""
    randperm = torch.randperm

    @counts_as_torch
    def recorded(*arguments: Any, **named: Any) -> Tensor:
        on_shuffle(sys._getframe(1), "randperm", None)
        return randperm(*arguments, **named)

    with patch.object(torch, "randperm", recorded):
        yield
