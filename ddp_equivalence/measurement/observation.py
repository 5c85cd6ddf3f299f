"""The data on how a rank's step ran: which examples it read, and what it reduced."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    Kind,
    ModuleCall,
    Trace,
    line_at,
    lines_of,
)
from ddp_equivalence.measurement.draws import Draw
from ddp_equivalence.measurement.gradient_watch import BufferWatch, GradientWatch, HookWatch
from ddp_equivalence.measurement.graph_watch import OwnBackward, OwnBackwards
from ddp_equivalence.measurement.lines import Handler, LineTracer, line_of_caller
from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.collectives import Collective
from ddp_equivalence.ranks.users_line import counts_as_torch

# These are frozen dataclasses. The ranks send them to the judging process.

Indices = tuple[int, ...]
"""Positions of examples in the big batch."""


@dataclass(frozen=True)
class RowsRead:
    """The rows that the model was called with, as rows of the big batch.

    ``candidates``: for every row, all positions in the big batch that it may come from: several, if
    these have equal rows. ``part``: which part of each row was read; "" for whole rows.
    ``declared``: the step has said it, by ``rank.read``, and it was not recognised.
    """

    candidates: tuple[Indices, ...]
    part: str = ""
    declared: bool = False

    @property
    def is_certain(self) -> bool:
        """True if every row can come from one position only."""
        return all(len(positions) == 1 for positions in self.candidates)

    @property
    def if_certain(self) -> Indices:
        """The position of every row; () unless every row can come from one position only."""
        return tuple(positions[0] for positions in self.candidates) if self.is_certain else ()


@dataclass(frozen=True)
class Forward:
    """One call of the model with gradients enabled.

    ``rows``: the rows that the model was called with; None if they are not known to be rows of the
    batch. ``weights``: a digest of the parameters at that moment. ``generator``: the state of
    torch's CPU generator. ``seed``: the seed of the generator in use, which is the GPU's on CUDA.
    ``step``: the number of the step, from 0. ``buffers``: what the model's buffers held then; empty
    if they are not known.
    """

    rows: RowsRead | None
    weights: str
    generator: bytes
    seed: int
    step: int
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Backward:
    """One call of backward.

    ``loss``: the value of the scalar that backward was called on (of several, the sum); None if
    there was no scalar. ``forwards``: how many forward passes had run before.
    ``issued``: how many collectives had been issued when it began and when it ended; None if torch
    has no flight recorder. ``step``: the number of the step, from 0. ``gradient``: the sampled
    elements of the gradient that this call computed on this rank, before any reduction, shape
    (elements,); None if it computed none.
    """

    loss: float | None
    forwards: int
    issued: tuple[int | None, int | None]
    step: int
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Wrapper:
    """One DistributedDataParallel wrapper around the model.

    ``synchronised``: for each of its forward passes, whether DDP was to reduce gradients in the
    backward pass. ``freed``: True if the wrapper was freed after a forward pass, before the
    backward pass began. ``buckets``: the names of the parameters in each bucket, as of the last
    forward pass. ``ignored``: the names of parameters that it was told not to reduce. ``logged``:
    entries of DDP's own logging data.
    """

    synchronised: tuple[bool, ...]
    freed: bool
    buckets: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    logged: Mapping[str, object]


@dataclass(frozen=True)
class Observation:
    """Everything that one rank did in all steps.

    ``frozen``: the parameters that required no gradient after the last step. ``buffers``: a digest
    of the model's buffers after the last step. ``gradients``: a digest of every gradient that a
    step left; {} of a large model. ``clipped``: the norms that torch was told to clip gradients to.
    ``collectives``: all that the rank issued; None if torch has no flight recorder.
    ``equal_examples``: groups of examples of the big batch that are equal in every tensor.
    ``calls``: those that matter for the gradients, in their order, with their lines.
    ``lines_run``: the steps and the lines of the user's code that ran, each once, in the order of
    their first run, without those of the forward pass. ``trace``: values on the way.
    ``own_backwards``: the user's own backward methods that ran. ``draws``: the random numbers that
    were drawn, if they were recorded, and ``left`` the sampled elements of the gradients that the
    first step left then. ``draws`` is None without a record. ``parts``: parameter -> which of the
    sampled elements of its gradient the rank has, as packed numbers; only of sharded ones.
    """

    forwards: tuple[Forward, ...]
    backwards: tuple[Backward, ...]
    wrappers: tuple[Wrapper, ...]
    frozen: tuple[str, ...]
    buffers: str
    gradients: Mapping[GradientKey, str]
    clipped: tuple[float, ...] = ()
    collectives: tuple[Collective, ...] | None = None
    equal_examples: tuple[Indices, ...] = ()
    calls: tuple[Call, ...] = ()
    lines_run: tuple[tuple[int, CodeLine], ...] = ()
    trace: Trace = field(default_factory=Trace)
    own_backwards: tuple[OwnBackward, ...] = ()
    draws: tuple[Draw, ...] | None = None
    left: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, bytes] = field(default_factory=dict)

    def rows_read(self, step: int) -> tuple[tuple[RowsRead, ...], ...] | None:
        """The rows of each micro-batch of one step; None if they are not known.

        A micro-batch has the rows of all forward passes that belong to one backward pass. If
        several of these forward passes read the same rows, or parts of the same rows, the rows
        count once.
        """
        micro_batches: list[tuple[RowsRead, ...]] = []
        begin = 0
        for backward in self.backwards:
            passes = [forward.rows for forward in self.forwards[begin : backward.forwards]]
            begin = backward.forwards
            if backward.step != step:
                continue
            if any(rows is None for rows in passes):
                return None
            distinct = {rows.candidates: rows for rows in passes if rows is not None}
            if passes:
                micro_batches.append(tuple(distinct.values()))
        return tuple(micro_batches) or None


# Hears every call of chosen modules, and leaves nothing on them.
#
# A hook on a model would travel with it into its copies and pickles, and torch.jit.script and
# ``torch.compile(fullgraph=True)`` refuse models with hooks of the kind that is needed here. So
# ``nn.Module.__call__`` itself is replaced while somebody listens. What a compiler or torch.jit
# traces is not heard.

Heard = Callable[[object], None] | None
"""Gets what the module returned; None if nobody wants to know."""

Listener = Callable[[tuple[Any, ...]], Heard]
"""Gets the positional arguments of a call, and behind them the dict of its named arguments."""

_call = nn.Module.__call__
_listeners: dict[int, tuple[weakref.ref[nn.Module], list[Listener]]] = {}
"""id of a module -> the module and its listeners."""


@contextmanager
def heard(module: nn.Module, listener: Listener) -> Iterator[None]:
    """Inside the block, ``listener`` hears every call of the module. It can make no call fail."""
    listen(module, listener)
    try:
        yield
    finally:
        stop_listening(module, listener)


def listen(module: nn.Module, listener: Listener) -> None:
    """Let ``listener`` hear every call of the module from now on, which is not kept alive."""
    entry = _listeners.get(id(module))
    if entry is None or entry[0]() is not module:
        number = id(module)
        entry = weakref.ref(module, lambda _: _forget(number)), []
        _listeners[number] = entry
        if nn.Module.__call__ is not _listened_to:
            global _call
            _call = nn.Module.__call__  # perhaps a patch of the user, which must still be called
            nn.Module.__call__ = _listened_to  # type: ignore[method-assign]
    entry[1].append(listener)


def stop_listening(module: nn.Module, listener: Listener) -> None:
    """Undo ``listen``."""
    entry = _listeners.get(id(module))
    if entry is None or listener not in entry[1]:
        return
    entry[1].remove(listener)
    if not entry[1]:
        _forget(id(module))


def _forget(number: int) -> None:
    _listeners.pop(number, None)
    if process_state.is_a_rank():
        return  # the next case listens again, and replacing the method takes 0.3 ms
    if not _listeners and nn.Module.__call__ is _listened_to:
        nn.Module.__call__ = _call  # type: ignore[method-assign]


@counts_as_torch
def _listened_to(module: nn.Module, /, *arguments: Any, **named: Any) -> Any:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return _call(module, *arguments, **named)
    entry = _entry_of(module)
    if entry is None:
        return _call(module, *arguments, **named)
    then = [_told(listener, (*arguments, named)) for listener in tuple(entry[1])]
    result = _call(module, *arguments, **named)
    for hear in then:
        if hear is not None:
            _told(hear, result)
    return result


def _entry_of(module: nn.Module) -> tuple[weakref.ref[nn.Module], list[Listener]] | None:
    """The entry of the module, or of the module that torch.compile has wrapped in it."""
    entry = _listeners.get(id(module))
    if entry is None and type(module).__name__ == "OptimizedModule":
        module = module.__dict__["_modules"].get("_orig_mod")
        entry = _listeners.get(id(module))
    return entry if entry is not None and entry[0]() is module else None


def _told(listener: Callable[[Any], Any], what: object) -> Any:
    """The result of the listener; None if it raises, since it must not make the call fail.

    No transform of torch.func, and no mode, sees what the listener does.
    """
    try:
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableFuncTorch(),
            # Entering this costs more than everything else here, and is rarely needed.
            _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext(),
        ):
            return listener(what)
    except Exception:
        return None


# Notices the lines that set a plain attribute of a module, such as its mode or dropout rate.

MOST_STATES = 500
"""Later ones are not recorded, since a model may count its own calls."""

PLAIN = (bool, int, float, str)


class ModuleStates:
    """``record(frame, what, name)`` gets what was set, such as ``training = False``, and the name
    of the module of ``model``, "" for the model itself.
    """

    def __init__(self, model: nn.Module, record: Callable[[FrameType, str, str], None]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._record = record
        self._left = MOST_STATES

    def handlers(self) -> dict[CodeType, Handler]:
        """Every attribute of a module is set through one function of torch."""
        return {nn.Module.__setattr__.__code__: self._on_set}

    def _on_set(self, frame: FrameType) -> None:
        values = frame.f_locals
        module, attribute, value = values["self"], values["name"], values["value"]
        name = self._names.get(id(module))
        if name is None or not isinstance(value, PLAIN) or attribute.startswith("_"):
            return
        before = module.__dict__.get(attribute)
        if before == value or not isinstance(before, PLAIN) or not self._left:
            return
        self._left -= 1
        self._record(frame, f"{attribute} = {value!r}", name)


# Notes which modules of a model a watched step called.

MOST_CALLS = 2_000
"""Later calls are not recorded."""

MOST_MODULES = 500
"""Of a model with more modules only so many are heard."""


class ModuleWatch:
    """``now()``: the number of the step, how many calls of backward have begun, and whether one
    runs.
    """

    def __init__(self, model: nn.Module, now: Callable[[], tuple[int, int, bool]]) -> None:
        self.calls: list[ModuleCall] = []
        self.complete = True
        self._now = now
        self._modules = list(model.named_modules())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside the block."""
        self.complete &= len(self._modules) <= MOST_MODULES
        with ExitStack() as listening:
            for name, module in self._modules[:MOST_MODULES]:
                listening.enter_context(heard(module, partial(self._on_call, name)))
            yield

    def _on_call(self, name: str, arguments: tuple[Any, ...]) -> Heard:
        _, _, in_backward = self._now()
        if in_backward:
            return None
        if len(self.calls) >= MOST_CALLS:
            self.complete = False
            return None
        line, with_gradients = lines_of(sys._getframe(1))[1], torch.is_grad_enabled()

        def ended(result: object) -> None:
            dtypes = dict.fromkeys(_dtypes((arguments, result)))
            self.calls.append(ModuleCall(name, line, tuple(dtypes), with_gradients))

        return ended


def _dtypes(values: object) -> Iterator[str]:
    """The types of all tensors of floating-point numbers."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield str(leaf.dtype).removeprefix("torch.")


# What is looked at with every line of the user's code, also inside a forward or backward pass.


class LineEvents:
    """``now()``: the number of the step, how many calls of backward have begun, and whether one
    runs. ``calls``: those of the step, to which ``append(kind, lines, ...)`` adds one.
    """

    def __init__(
        self,
        model: nn.Module,
        now: Callable[[], tuple[int, int, bool]],
        calls: list[Call],
        append: Callable[..., None],
    ) -> None:
        self.own_backwards = OwnBackwards(now)
        self.buffers = BufferWatch(model)
        self._states = ModuleStates(model, self._on_state)
        self._now = now
        self._calls = calls
        self._append = append
        self._hooks: HookWatch | None = None
        self._line: CodeLine | None = None

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        return self._states.handlers()

    def attach(self, tracer: LineTracer, gradients: GradientWatch) -> None:
        """From now on the tracer tells of its events. ``gradients``: of the same model."""
        self._hooks = HookWatch(gradients, self._calls, self._append)
        tracer.on_event = self.on_event

    def begin_step(self) -> None:
        """From now on, everything belongs to the next step."""
        self._line = None
        self.buffers.changed()

    def backward_ended(self) -> None:
        """No hook runs any longer."""
        if self._hooks is not None:
            self._hooks.backward_ended()

    def on_event(self, frame: FrameType, event: str, returned: object) -> None:
        """A function of the user's begins or returns, or a line of it is to run."""
        _, _, in_backward = self._now()
        if event != "call":
            self._ended(line_at(frame) if event == "line" else line_of_caller(frame))
        if in_backward and self._hooks is not None:
            self._hooks.on_event(frame, event)
        if in_backward and event == "return":
            self.own_backwards.on_return(frame, returned)

    def _ended(self, following: CodeLine | None) -> None:
        """A line, or a part of one, has run, and this one follows."""
        names = self.buffers.changed()
        if names and self._line is not None:
            self._append(Kind.BUFFERS, (self._line, self._line), names=names)
        self._line = following

    def _on_state(self, frame: FrameType, what: str, name: str) -> None:
        last, lines = self._calls[-1] if self._calls else None, lines_of(frame)
        this = Kind.MODULE_STATE, *lines, what
        if last is not None and (last.kind, last.line, last.users_line, last.what) == this:
            self._calls[-1] = replace(last, names=(*last.names, name))
        else:
            self._append(Kind.MODULE_STATE, lines, what=what, names=(name,))
