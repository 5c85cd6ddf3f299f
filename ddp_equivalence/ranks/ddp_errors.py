"""What an error of DistributedDataParallel (DDP) is about, read on the rank that raises it.

Torch's texts name few of the parameters and none of the modules, but the frames that raise hold
both.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from types import FrameType
from typing import Any

from torch import nn

from ddp_equivalence.ranks.importable import belongs_to_user


class About(Enum):
    """What has gone wrong."""

    CHECKPOINTED = auto()
    NESTED_BACKWARD = auto()
    SECOND_BACKWARD = auto()
    OUTSIDE_FORWARD = auto()
    UNUSED = auto()
    WEIGHTS_CHANGED = auto()
    OTHER_MODEL = auto()


@dataclass(frozen=True)
class DdpError:
    """``names``: the parameters that the error is about. ``module``: the module whose backward pass
    runs inside another one, or that is behind two losses. ``line``: another line to look at.
    ``reduced``: the shape of every parameter that DDP reduces, by name.
    """

    about: About
    names: tuple[str, ...] = ()
    module: str = ""
    line: str = ""
    reduced: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


Frames = Sequence[tuple[FrameType, int]]
"""Frames with the number of the line that each is at, the outermost first."""


def ddp_error(text: str, frames: Frames) -> DdpError | None:
    """What an error with this text is about, which these frames have raised; None if it is none of
    DDP's.
    """
    for pattern, read in READERS.items():
        if found := re.search(pattern, text):
            with suppress(Exception):  # the error itself is worth more than what it is about
                return read(found, frames)
    return None


def _ready_twice(found: re.Match[str], frames: Frames) -> DdpError:
    name = found["name"]
    wrapper = next((one for one in _wrappers() if name in _reduced(one)), None)
    module = "" if wrapper is None else name.rpartition(".")[0]
    passes = [at for at, (frame, _) in enumerate(frames) if frame.f_code.co_name == ENGINE]
    if len(passes) > 1:  # one pass runs inside another
        return _nested(name, wrapper, frames[passes[0] : passes[-1]])
    if wrapper is not None and wrapper.find_unused_parameters:
        return DdpError(About.OUTSIDE_FORWARD, (name,), module)
    return DdpError(About.SECOND_BACKWARD, (name,), module, _earlier(".backward(", frames))


ENGINE = "_engine_run_backward"
"""The function of torch that runs a backward pass."""


def _nested(name: str, wrapper: Any, frames: Frames) -> DdpError:
    """The backward pass that these frames run is one of checkpointing, or of the user's own."""
    names = {} if wrapper is None else {one: name for name, one in wrapper.module.named_modules()}
    module = name.rpartition(".")[0]
    for frame, _ in frames:
        if (function := getattr(frame.f_locals.get("ctx"), "run_function", None)) is not None:
            while hasattr(function, "func"):
                function = function.func
            function = getattr(function, "__self__", function)
            known = names.get(function, module) if isinstance(function, nn.Module) else module
            return DdpError(About.CHECKPOINTED, (name,), known, _line_of_checkpoint(names))
    own = [
        (frame.f_code.co_filename, number)
        for frame, number in frames
        if is_users(frame.f_code.co_filename)
    ]
    line = next((text_of_line(*place) for place in own), "")
    return DdpError(About.NESTED_BACKWARD, (name,), module, line)


def _line_of_checkpoint(modules: Iterable[nn.Module]) -> str:
    """The first line of the user's own modules that checkpoints something; "" without one."""
    for kind in dict.fromkeys(kind for one in modules for kind in type(one).__mro__):
        for method in filter(inspect.isfunction, vars(kind).values()):
            file = method.__code__.co_filename
            with suppress(OSError):
                lines, first = inspect.getsourcelines(method)
                at = (n for n, line in enumerate(lines) if re.search(r"\bcheckpoint\w*\(", line))
                if is_users(file) and (number := next(at, None)) is not None:
                    return text_of_line(file, first + number)
    return ""


def _earlier(call: str, frames: Frames) -> str:
    """The last line of the same function of the user's that stands before and makes such a call."""
    frame, number = next(one for one in reversed(frames) if is_users(one[0].f_code.co_filename))
    file, first = frame.f_code.co_filename, frame.f_code.co_firstlineno
    lines = (at for at in range(number - 1, first, -1) if call in linecache.getline(file, at))
    return next((text_of_line(file, at) for at in lines), "")


def is_users(file: str) -> bool:
    """True for a file of the user's own; not for ``<frozen importlib._bootstrap>``."""
    return not file.startswith("<") and belongs_to_user(file)


def text_of_line(file: str, number: int) -> str:
    """``file:12: source``."""
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


PLACE = re.compile(r"^(?P<file>.+?):(?P<number>\d+): ")
"""The place of such a line."""


def _unused(found: re.Match[str], frames: Frames) -> DdpError:
    names = list(_reduced(_wrapper_in(frames)))
    return DdpError(About.UNUSED, tuple(names[int(at)] for at in found["at"].split()))


def _changed(found: re.Match[str], frames: Frames) -> DdpError | None:
    """The parameters with this shape, or its reverse, and this number of changes."""
    shape = tuple(map(int, re.findall(r"\d+", found["shape"])))
    names = dict.fromkeys(
        name
        for wrapper in _wrappers()
        for name, weight in wrapper.module.named_parameters()
        if weight._version == int(found["version"])
        if tuple(weight.shape) in (shape, shape[::-1])
    )
    line = _earlier(".step(", frames)
    return DdpError(About.WEIGHTS_CHANGED, tuple(names), line=line) if names else None


def _other_model(found: re.Match[str], frames: Frames) -> DdpError:
    reduced = _reduced(_wrapper_in(frames))
    names = (list(reduced)[int(found["at"])],) if found["at"] else ()
    return DdpError(About.OTHER_MODEL, names, reduced=reduced)


READERS: Mapping[str, Callable[[re.Match[str], Frames], DdpError | None]] = {
    r"with name (?P<name>\S+) has been marked as ready twice": _ready_twice,
    r"did not receive grad for rank \d+: (?P<at>\d[\d ]*)": _unused,
    r"inplace operation: \[\S+ \[(?P<shape>[\d, ]*)\]\].* version (?P<version>\d+); ": _changed,
    r"DDP expects same model across all ranks|params\[(?P<at>\d+)\] in this process": _other_model,
}
"""The words by which an error of DDP is known, each with what reads the rest."""


def _wrappers() -> list[Any]:
    """The DDPs of this work. Those that earlier work has kept are frozen, so that Python's list of
    objects has none of them.
    """
    ddp = nn.parallel.DistributedDataParallel
    every = (one for one in gc.get_objects() if issubclass(type(one), ddp))
    return [one for one in every if "module" in one._modules]


def _wrapper_in(frames: Frames) -> Any:
    """The DDP whose method is the innermost one of these frames."""
    own = (frame.f_locals.get("self") for frame, _ in reversed(frames))
    return next(one for one in own if isinstance(one, nn.parallel.DistributedDataParallel))


def _reduced(wrapper: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters that it reduces, in the order in which it numbers them."""
    return {
        name: tuple(weight.shape)
        for name, weight in wrapper.module.named_parameters()
        if weight.requires_grad and name not in wrapper.parameters_to_ignore
    }
