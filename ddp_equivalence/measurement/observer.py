"""Watches one rank's model while its step runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.case.random_state import seed_in_use
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.gradients import ElementSample, dense, digest
from ddp_equivalence.measurement.call_watch import CallWatch, Lines
from ddp_equivalence.measurement.calls import (
    Call,
    is_users,
    leaves_of_arguments,
    lines_of,
    plain,
    tensors_in,
)
from ddp_equivalence.measurement.example_lookup import ExampleLookup, UnorderedRows, row_hashes
from ddp_equivalence.measurement.observation import (
    Backward,
    Forward,
    Heard,
    ModuleWatch,
    Observation,
    Wrapper,
    heard,
    listen,
    stop_listening,
)
from ddp_equivalence.measurement.returned import DeclaredRows
from ddp_equivalence.ranks.collectives import Collective
from ddp_equivalence.ranks.users_line import counts_as_torch

# A step is watched only if its gradients differ: the ranks then run it a second time under an
# ``Observer``.


class Observer:
    """``lookup``: recognises examples in the model's inputs. ``declared``: the rows that the step
    says it reads. ``sample``: the elements of each gradient that are kept. ``inside_model``: as in
    ``CallWatch``.
    """

    def __init__(
        self,
        model: nn.Module,
        lookup: ExampleLookup,
        declared: DeclaredRows,
        sample: ElementSample[str],
        inside_model: bool = False,
    ) -> None:
        self._model = model
        self._sample = sample
        self._local_gradient: dict[str, Tensor] = {}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._lookup, self._declared = lookup, declared
        self._forwards: list[Forward] = []
        self.backwards: list[Backward] = []
        self._wrappers: list[WrapperObserver] = []
        self._clipped: list[float] = []
        self._inside = False
        self._calls = CallWatch(model, sample, inside_model)
        self._modules = ModuleWatch(model, self._calls.now)
        self._gathered = GatheredWeights(model, self._names, self._calls.sharded, self._on_gradient)
        self._step = 0

    @property
    def step(self) -> int:
        """The number of the step that runs; the caller sets it before each step."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._calls.begin_step(number)

    @contextmanager
    def watching(self, running: FrameType | None = None) -> Iterator[None]:
        """Watch inside the block. ``running``: also follow the functions that run already, the
        innermost of which this is.
        """
        handles = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name in self._sample.sizes:
                # The hook sees the gradient before it is added to .grad, and before DDP sees it.
                handles.append(parameter.register_hook(partial(self._on_gradient, name)))
        initialise = DistributedDataParallel.__init__
        clip = torch.nn.utils.clip_grad_norm_

        @counts_as_torch
        def wrapping(ddp: Any, *arguments: Any, **named: Any) -> None:
            initialise(ddp, *arguments, **named)
            self._calls.was_wrapped(ddp, lines_of(sys._getframe(1)), None)
            self._wrappers.append(WrapperObserver(ddp, self._names, self._calls))

        def clipping(parameters: Any, max_norm: float, *arguments: Any, **named: Any) -> Tensor:
            self._clipped.append(float(max_norm))
            return clip(parameters, max_norm, *arguments, **named)

        try:
            with (
                backward_on_calling_thread(),
                heard(self._model, self._on_forward),
                self._modules.watching(),
                self._gathered.watching(),
                patch.object(DistributedDataParallel, "__init__", wrapping),
                patch.object(torch.nn.utils, "clip_grad_norm_", clipping),
                patch.object(torch.autograd, "backward", self._observed(torch.autograd.backward)),
                patch.object(torch.autograd, "grad", self._observed(torch.autograd.grad)),
                self._calls.watching(running),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for wrapper in self._wrappers:
                wrapper.stop()

    def was_wrapped(
        self, ddp: DistributedDataParallel, lines: Lines, off_at: Lines | None = None
    ) -> None:
        """The model was wrapped before it was watched, by these lines. ``off_at``: those that have
        switched synchronisation off since then, if it is off.
        """
        self._calls.was_wrapped(ddp, lines, off_at)
        self._wrappers.append(WrapperObserver(ddp, self._names, self._calls))

    def was_set_up(self, calls: Sequence[Call]) -> None:
        """These calls were made before the model was watched."""
        self._calls.were_made_before(calls)

    def found(
        self,
        gradients: Mapping[GradientKey, Tensor | None],
        collectives: tuple[Collective, ...] | None,
    ) -> Observation:
        """Everything that was seen. ``gradients``: what the step has left."""
        return Observation(
            forwards=tuple(self._forwards),
            backwards=tuple(self.backwards),
            wrappers=tuple(wrapper.observed() for wrapper in self._wrappers),
            frozen=tuple(
                self._names.get(id(parameter), name)
                for name, parameter in self._model.named_parameters()
                if not parameter.requires_grad
            ),
            buffers=digest(dict(self._model.named_buffers())),
            gradients={key: digest({key[1]: gradient}) for key, gradient in gradients.items()}
            if self._sample.is_whole
            else {},
            clipped=tuple(self._clipped),
            collectives=collectives,
            equal_examples=self._lookup.equal_examples(),
            calls=tuple(self._calls.calls),
            lines_run=tuple(self._calls.lines_run),
            trace=self._calls.trace(self._modules),
            own_backwards=self._calls.events.own_backwards.found,
            parts=self._calls.parts,
        )

    def _on_forward(self, arguments: tuple[Any, ...]) -> Heard:
        if not torch.is_grad_enabled():
            return None
        rows = self._declared.or_recognised(self._lookup.rows_of(arguments))
        examples = rows.if_certain if rows is not None else ()
        self._calls.reads(sys._getframe(), arguments, examples)
        ended = self._calls.forward(self._model)
        self._forwards.append(
            Forward(
                rows=rows,
                weights=_digest_of_weights(self._model),
                generator=torch.get_rng_state().numpy().tobytes(),
                seed=seed_in_use(),
                step=self.step,
                buffers=self._calls.events.buffers.values(),
            )
        )
        return lambda _: ended()

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        try:
            value = self._sample.of_one(name, plain(gradient))
        except Exception:  # never fail in the user's backward pass
            return
        self._local_gradient[name] = (
            self._local_gradient[name] + value if name in self._local_gradient else value
        )

    def _is_aside(self, outputs: Any, inputs: Any, *arguments: Any, **named: Any) -> bool:
        """True for a call of ``torch.autograd.grad`` that is a part of the loss and not a backward
        pass, such as for a gradient penalty or for the weight of a term: it keeps the graph, and
        asks for the gradients of few parameters.
        """
        graph = [named.get("retain_graph"), named.get("create_graph"), *arguments[1:3]]
        of_trained = {id(p) for p in self._model.parameters() if p.requires_grad}
        several = inputs.values() if isinstance(inputs, Mapping) else inputs
        asked = [inputs] if isinstance(inputs, Tensor) else list(several)
        return any(graph) and 2 * len({id(one) for one in asked} & of_trained) < len(of_trained)

    def _observed(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.autograd.backward`` or ``grad`` so that each call is recorded."""
        accumulate = torch.autograd.backward

        @counts_as_torch
        def observed(*arguments: Any, **named: Any) -> Any:
            roots = _roots(arguments, named)
            if self._inside:  # activation checkpointing calls backward inside backward
                return differentiate(*arguments, **named)
            if differentiate is not accumulate and self._is_aside(*arguments, **named):
                return differentiate(*arguments, **named)
            loss = _sum_of_scalars(roots)
            for wrapper in self._wrappers:
                wrapper.backward_begins()
            self._local_gradient = {}
            self._inside = True
            own = (
                self._local_gradient
                if differentiate is accumulate and not named.get("inputs")
                else {}
            )
            try:
                with self._calls.backward(roots, loss, own) as issued:
                    result = differentiate(*arguments, **named)
            finally:
                self._inside = False
            self.backwards.append(
                Backward(
                    loss=loss,
                    forwards=len(self._forwards),
                    issued=(issued[0], issued[1]),
                    step=self.step,
                    gradient=self._sample.joined(self._local_gradient)
                    if self._local_gradient
                    else None,
                )
            )
            self._local_gradient = {}
            return result

        return observed


def _roots(arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that ``torch.autograd.backward`` or ``grad`` is to differentiate."""
    given = arguments[0] if arguments else named.get("tensors", named.get("outputs"))
    return [given] if isinstance(given, Tensor) else list(given or ())


def _sum_of_scalars(roots: Sequence[Tensor]) -> float | None:
    """The sum of the scalars that backward is called on; None if there is none, or not known."""
    try:
        with torch._C._DisableFuncTorch():
            scalars = [value for root in roots if (value := plain(root)).numel() == 1]
            return sum(float(value.detach()) for value in scalars) if scalars else None
    except Exception:
        return None


def _digest_of_weights(model: nn.Module) -> str:
    """A digest of the weights; "" if a compiler or a transform of torch.func holds them."""
    try:
        return digest({name: plain(weight) for name, weight in model.named_parameters()})
    except Exception:
        return ""


# Hears of the gradients of weights that are gathered from shards for a while.

MOST_MODULES = 500
"""Of a model with more modules only so many are looked at."""


class GatheredWeights:
    """Tells ``note(name, gradient)`` what backward computes for a weight that a module uses in
    place of the parameter that it was built with: FSDP gathers it from its shards, and reduces its
    gradient to these.

    ``names``: id of a parameter of ``model`` -> its name. ``sharded()``: the names of those whose
    places shards have taken.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str],
        sharded: Callable[[], set[str]],
        note: Callable[[str, Tensor], None],
    ) -> None:
        self._note = note
        self._sharded = sharded
        self._heard: Any = WeakTensorKeyDictionary()
        self._modules = list(model.modules())[:MOST_MODULES]
        self._built: dict[int, dict[str, str]] = {
            id(module): {
                key: names[id(one)] for key, one in module._parameters.items() if id(one) in names
            }
            for module in self._modules
        }
        self._watched = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of them inside the block."""
        with self._watched:
            for module in self._modules:
                self._watched.enter_context(heard(module, self._first_call(module)))
            yield

    def _first_call(self, module: nn.Module) -> Callable[[Any], None]:
        """Hooks are for modules with sharded parameters, also in modules inside: attention reads
        the weights of a layer that it does not call. They run after those of FSDP, which gather
        the weights.
        """
        hooked = False

        def called(_: Any) -> None:
            nonlocal hooked
            if hooked:
                return
            inside = [self._built.get(id(one), {}) for one in module.modules()]
            if self._sharded() & {name for built in inside for name in built.values()}:
                hooked = True
                hook = module.register_forward_pre_hook(self._before_forward)
                self._watched.callback(hook.remove)

        return called

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        with suppress(Exception):  # never fail in the user's forward pass
            sharded = self._sharded()
            for one in module.modules():
                for key, name in self._built.get(id(one), {}).items():
                    if name in sharded:
                        # Not as an attribute: a parametrization would compute it once more.
                        self._hear(name, one._parameters.get(key, one.__dict__.get(key)))

    def _hear(self, name: str, weight: object) -> None:
        if not isinstance(weight, Tensor):
            return
        if weight.requires_grad and weight not in self._heard:
            self._heard[weight] = True
            self._watched.callback(weight.register_hook(partial(self._note, name)).remove)


# Watches one DistributedDataParallel wrapper around a model that is observed.

MOST_BUCKET_ELEMENTS = 2_000_000
"""A larger model's buckets are not read, since DDP makes tensors of their size to show them."""


class WrapperObserver:
    """Watches one DDP wrapper, by a weak reference, so that it notices when the step frees it."""

    def __init__(
        self, ddp: DistributedDataParallel, names: Mapping[int, str], calls: CallWatch
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._calls = calls
        self._names = names
        self._synchronised: list[bool] = []
        self._waiting = False
        self._freed = False
        self._buckets: tuple[tuple[str, ...], ...] = ()
        self._logged: dict[str, object] = {}
        self._ignored = tuple(sorted(ddp.parameters_to_ignore))
        listen(ddp, self._on_forward)

    def stop(self) -> None:
        """Stop watching."""
        ddp = self._ddp()
        if ddp is not None:
            stop_listening(ddp, self._on_forward)

    def _on_forward(self, arguments: tuple[Any, ...]) -> Heard:
        ddp: Any = self._ddp()
        if ddp is None or not torch.is_grad_enabled():
            return None
        ended = self._calls.forward(ddp)
        self._synchronised.append(bool(ddp.require_backward_grad_sync))
        self._waiting = True
        if sum(parameter.numel() for parameter in ddp.parameters()) <= MOST_BUCKET_ELEMENTS:
            self._buckets = tuple(
                tuple(self._names.get(id(parameter), "?") for parameter in bucket.parameters())
                for bucket in ddp.reducer._get_zeros_like_grad_buckets()  # torch: not public
            )
        self._logged = {
            name: value
            for name, value in ddp._get_ddp_logging_data().items()
            if name in LOGGED and value not in ("", "N/A")
        }
        return lambda _: ended()

    def backward_begins(self) -> None:
        """Note whether the wrapper was freed between its forward pass and this backward pass."""
        self._freed |= self._waiting and self._ddp() is None
        self._waiting = False

    def observed(self) -> Wrapper:
        return Wrapper(
            synchronised=tuple(self._synchronised),
            freed=self._freed,
            buckets=self._buckets,
            ignored=self._ignored,
            logged=self._logged,
        )


LOGGED = (
    *("bucket_sizes", "rebuilt_bucket_sizes", "bucket_cap_bytes", "find_unused_parameters"),
    *("static_graph", "gradient_as_bucket_view", "broadcast_buffers", "comm_hook"),
    *("has_sync_bn", "unused_parameter_size", "num_parameter_tensors", "world_size"),
)
"""The entries of DDP's own logging data that can explain a gradient."""


# Records what a rank's model was called with, so that ranks that do the same work are noticed.


class CalledWith:
    """Records everything that the model is called with, and the gradients of what it returns.

    ``given``: what the rank was given. ``in_any_order``: neither the order of the examples counts
    nor how they are divided among calls. The step takes its examples itself, and ranks that read
    all of them in different orders do the same work. Calls without gradients are left out: they
    take no part in the step's gradient.
    """

    def __init__(self, given: Sequence[object], in_any_order: bool = False) -> None:
        self._given = [
            leaf
            for leaf in tensors_of(given)
            if leaf.layout == torch.strided and not leaf.is_nested and leaf.numel()
        ]
        self._rows = UnorderedRows() if in_any_order else None
        self._memory = {leaf.untyped_storage().data_ptr() for leaf in self._given}
        self._seen: list[str] = []
        self._called = False
        self._gradients = torch.zeros(4, dtype=torch.float64)
        self._is_known = True
        self.given_rows = False
        """True once the model was called with a copy of the first row of something that was dealt
        to the rank."""

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record the calls of this model inside the block."""
        with heard(model, self._listen):
            yield

    @property
    def arguments(self) -> str | None:
        """A hash of all arguments; None if the model was never called, or not all are known."""
        if not (self._called and self._is_known):
            return None
        return " ".join(self._seen) if self._rows is None else str(self._rows)

    @property
    def came_back(self) -> tuple[float, ...]:
        """Sums of the gradients of what the model returned, of their absolute values and squares,
        and of them times a number that goes with the row of the input. None of these depends on the
        order of the examples.
        """
        return tuple(self._gradients.tolist())

    def _listen(self, arguments: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled():
            return None
        self._called = True
        self._is_known, known = False, self._is_known  # in case a tensor is not plain
        tensors = tensors_in(arguments)
        if self._rows is not None:
            self._rows.add([dense(tensor) for tensor in tensors])
        elif any(map(self._is_given, tensors)):
            self._is_known = known
            self._seen.append(_digest(tensors))
            return None  # examples that were dealt to the rank: other ranks have others
        else:
            self._seen.append(_digest(tensors))
            self.given_rows = self.given_rows or any(map(self._holds_a_given_row, tensors))
        self._is_known = known
        rows = next((dense(one) for one in tensors if one.ndim), torch.empty(0))
        return partial(self._returned, _numbers_of(rows))

    def _returned(self, numbers: Tensor, result: object) -> None:
        for leaf in leaves_of_arguments(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                plain(leaf).register_hook(partial(self._came_back, numbers))

    def _came_back(self, numbers: Tensor, gradient: Tensor) -> None:
        """Add up the gradient of what the model returned. ``numbers``: one for every input row."""
        try:
            values = dense(plain(gradient)).to("cpu", torch.float64)
            by_row = values.reshape(len(values), -1).sum(1) if values.ndim else values.reshape(1)
            if len(numbers) != len(by_row):  # rows of the output do not belong to rows of the input
                numbers = _numbers_of(torch.arange(len(by_row)))
            sums = (values.sum(), values.abs().sum(), values.square().sum(), numbers @ by_row)
            self._gradients += torch.stack(sums)
        except Exception:  # never fail in the user's backward pass
            self._is_known = False

    def _is_given(self, tensor: Tensor) -> bool:
        """True if the tensor shares its memory with one that the rank was given."""
        if tensor.layout != torch.strided or not tensor.numel():
            return False
        return tensor.untyped_storage().data_ptr() in self._memory

    def _holds_a_given_row(self, tensor: Tensor) -> bool:
        """True if a row of the tensor is the first row that the rank was given."""
        if tensor.layout != torch.strided or not tensor.ndim or not tensor.numel():
            return False
        rows = tensor.detach().reshape(len(tensor), -1)
        return any(
            bool((rows == leaf[0].reshape(-1).to(rows.dtype)).all(1).any())
            for leaf in self._given
            if leaf[0].numel() == rows.shape[1]
        )


def _digest(tensors: Sequence[Tensor]) -> str:
    return digest((str(place), one) for place, one in enumerate(tensors))


def _numbers_of(rows: Tensor) -> Tensor:
    """A number from 0 to 1 for every row, which follows from its bytes alone."""
    return torch.from_numpy(row_hashes(rows) / 2.0**64)


# Notices an ``nn.DataParallel`` that a step makes and that has no device to run on.
#
# Without CUDA devices it has no device ids. It then calls the module itself, without an error and
# without anything that is parallel, so that its result is right whatever the step does.


class IdleDataParallel:
    """``called``: a wrapper without devices, which is no part of ``model`` as it was built, was
    called inside ``watched``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._built = {id(one) for one in model.modules() if isinstance(one, nn.DataParallel)}
        self.called = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The block runs a step."""
        forward = nn.DataParallel.forward

        def watching(wrapper: Any, *inputs: Any, **named: Any) -> Any:
            if not wrapper.device_ids and id(wrapper) not in self._built:
                self.called = True
            return forward(wrapper, *inputs, **named)

        with patch.object(nn.DataParallel, "forward", watching):
            yield


# Lets backward passes run on the thread that calls them, so that what watches it sees them.
#
# On CUDA autograd runs a backward pass on a thread of the device. A trace function, and the
# frames of the line that called it, are not there: hooks, backward methods of the user's own, and
# the line of every operation would be missing. On the CPU this is how backward passes run anyway.
# Source: docs.pytorch.org, ``torch.autograd.grad_mode.set_multithreading_enabled``.

_before: list[bool] = []
"""For each block that runs, whether autograd might use other threads before the first of them."""


@contextmanager
def backward_on_calling_thread() -> Iterator[None]:
    """Inside the block, the backward passes that this thread calls run on it.

    Blocks may end in another order than that in which they began: a log of operations begins before
    a step is observed, and ends before it. The setting comes back with the last one.
    """
    _before.append(_before[0] if _before else torch._C._is_multithreading_enabled())
    torch._C._set_multithreading_enabled(False)
    try:
        yield
    finally:
        before = _before.pop()
        if not _before:
            torch._C._set_multithreading_enabled(before)


# Records which lines of the user's code run, and what kind of value each local name holds.

MOST_LINES = 20_000
"""So many lines are remembered."""

MOST_ATTRIBUTES = 50
"""Of an object with more attributes, none is described."""


@contextmanager
def traced(on_call: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Call this for each function that begins inside the block, unless somebody else, such as a
    debugger, traces this thread already.
    """
    if sys.gettrace() is not None:
        yield
        return
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(None)


@dataclass
class LocalsSeen:
    """``lines``: file -> the lines that have run.

    ``values``: (file, first line of a function, with its decorators) -> name of a local variable,
    or ``self.x`` for an attribute of self -> a description of its value when the function ended,
    such as "tensor float64 3x4" or "int".
    """

    lines: dict[str, set[int]] = field(default_factory=dict)
    values: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)

    def add(self, other: LocalsSeen) -> None:
        """Take over what another rank has seen, where this one has seen nothing."""
        for file, lines in other.lines.items():
            self.lines.setdefault(file, set()).update(lines)
        for place, values in other.values.items():
            self.values[place] = values | self.values.get(place, {})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside the block, unless somebody else traces this thread already."""
        with backward_on_calling_thread(), traced(self._on_call):
            yield

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if is_users(frame.f_code.co_filename) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "line":
            lines = self.lines.setdefault(code.co_filename, set())
            if len(lines) < MOST_LINES:
                lines.add(frame.f_lineno)
        elif event == "return" and not code.co_name.startswith("<"):  # no lambda, no module
            self._on_return(frame)
        return self._on_line

    def _on_return(self, frame: FrameType) -> None:
        code = frame.f_code
        known = self.values.setdefault((code.co_filename, code.co_firstlineno), {})
        known.update({name: described(value) for name, value in named_in(frame)})


def named_in(frame: FrameType) -> Iterator[tuple[str, object]]:
    """The local variables of a frame, and the attributes of self, by name."""
    for name, value in list(frame.f_locals.items()):
        if name.isidentifier():  # pytest adds names that nobody can write
            yield name, value
    owner = frame.f_locals.get("self")
    try:
        attributes: Mapping[str, object] = dict(object.__getattribute__(owner, "__dict__"))
    except AttributeError:  # its class has slots
        return
    if issubclass(type(owner), nn.Module):
        attributes = {name: one for name, one in attributes.items() if not name.startswith("_")}
    if len(attributes) <= MOST_ATTRIBUTES:
        for name, value in attributes.items():
            yield f"self.{name}", value


def described(value: object) -> str:
    """The kind of a value. Values with the same description can stand for each other."""
    kind = type(value)
    if not issubclass(kind, Tensor):  # of the type alone: the user's object may answer anything
        return kind.__name__
    assert isinstance(value, Tensor)
    try:
        shape = "x".join(map(str, value.shape))
    except RuntimeError:  # a nested tensor has none
        return f"{kind.__name__} {value.dtype}"
    return f"tensor {str(value.dtype).removeprefix('torch.')} {shape}".rstrip()
