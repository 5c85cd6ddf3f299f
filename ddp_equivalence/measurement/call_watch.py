"""Records the calls of a step that matter for its gradients."""

from __future__ import annotations

import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, clip_grads_with_norm_

from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.measurement.calls import (
    DATA_FUNCTIONS,
    Call,
    CodeLine,
    Contents,
    Described,
    GradientChange,
    Kind,
    Trace,
    attributes_of_hook,
    beginning_of,
    callers_behind,
    callers_of,
    is_shown,
    is_users,
    leaves_of_arguments,
    line_that_named,
    lines_of,
    own_length,
    own_sampler,
    owner_of_numbers,
    state_of_hook,
)
from ddp_equivalence.measurement.draws import (
    RANDOM_AND_COUPLING,
    IndexLists,
    randperm_recorded,
    shuffle_handlers,
)
from ddp_equivalence.measurement.gradient_changes import changed_by_hooks, collective_call, merged
from ddp_equivalence.measurement.gradient_watch import GradientWatch, StateLog, WeightWatch
from ddp_equivalence.measurement.graph_watch import GraphLines, LossWatch
from ddp_equivalence.measurement.lines import (
    Handler,
    LineTracer,
    TensorOrigins,
    code_of,
    merged_handlers,
)
from ddp_equivalence.measurement.observation import LineEvents, ModuleWatch
from ddp_equivalence.measurement.whole_tensors import (
    divide_factor_functions,
    ignored_among,
    parameters_of,
    ranks_of,
    sharding_functions,
)
from ddp_equivalence.ranks.collectives import Issued, issued_so_far, listening

# Records the calls of a step that matter for its gradients, and the lines that made them.

MOST_CALLS = 5_000  # later ones are not recorded
MOST_IN_VAIN = 20
"""A line after which no loss was found so often is not looked at again: long loops stay fast."""


class CallWatch:
    """Records what one rank's step does with the gradients of ``model``.

    ``sample``: the elements of each gradient that are kept. The caller says when the model is
    called, when backward runs and when a step begins. ``further`` records where examples, weights
    and losses come from. ``backwards``: the calls of backward that have begun in this step.
    ``inside_model``: also follow the lines of the model's own forward pass, in which a script may
    compute its loss.
    """

    def __init__(
        self, model: nn.Module, sample: ElementSample[str], inside_model: bool = False
    ) -> None:
        self._inside_model = inside_model
        self.step = 0
        self.calls: list[Call] = []
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._gradients = GradientWatch(model, sample)
        self._states = StateLog(self._gradients)
        self._losses = LossWatch(self._on_loss)
        self._in_vain: dict[CodeLine, int] = {}
        self._temporaries = TemporaryResults()
        self._synchronisation = SynchronisationWatch()
        self.further = FurtherCalls(model, self._gradients.parameters, self._append)
        torchs = TorchCalls(self._record, self._names).handlers()
        shuffles = {code_of(f): one for f, one in shuffle_handlers(self._on_shuffle).items()}
        self.events = LineEvents(
            model, self.now, self.calls, self._append_if_recorded, lambda: self._tracer.paused
        )
        events = self.events.handlers()
        handlers = merged_handlers(self.further.handlers(), torchs, shuffles, events)
        self._tracer = LineTracer(handlers, self._after_line, self._in_frame)
        self.events.attach(self._tracer, self._gradients)
        self.backwards = 0
        self._in_backward = False
        self._process = os.getpid()

    def begin_step(self, number: int) -> None:
        """What is recorded from now on belongs to this step."""
        self.step = self.further.step = number
        self.backwards = 0
        self.events.begin_step()

    def trace(self, modules: ModuleWatch) -> Trace:
        """The values on the way. ``modules``: has watched the modules of the same model."""
        return Trace(
            module_calls=tuple(modules.calls),
            states=tuple(self._states.states),
            each=self._states.each,
            complete=modules.complete and self._states.complete,
            lines_run=self._tracer.lines_run,
            times_run=self._tracer.times_run,
        )

    @contextmanager
    def watching(self, running: FrameType | None = None) -> Iterator[None]:
        """Record inside the block. ``running``: as in ``LineTracer.tracing``."""
        with (
            listening(self._on_issue, self._on_wait),
            randperm_recorded(self._on_shuffle),
            self._tracer.tracing(running),
        ):
            yield
        self._note_changes(None, by_value=True)

    def forward(self, module: nn.Module) -> Callable[[], None]:
        """The model or a wrapper begins its forward pass. Call the result at its end."""
        frame = sys._getframe(1)
        chosen_at = line_that_named(module, frame)
        self._record(Kind.FORWARD, frame, what=type(module).__name__, chosen_at=chosen_at)
        before = self._tracer.paused
        self._tracer.paused = before or not self._inside_model

        def ended() -> None:
            self._tracer.paused = before

        return ended

    def was_wrapped(self, ddp: DistributedDataParallel, at: Lines, off_at: Lines | None) -> None:
        """A wrapper was made by these lines; ``off_at`` have switched synchronisation off."""
        names, ranks = parameters_of(ddp.module, self._names), ranks_of(vars(ddp))
        self._append_if_recorded(Kind.WRAP, at, what=type(ddp).__name__, names=names, ranks=ranks)
        self._synchronisation.add(ddp)
        if off_at is not None:
            self._append_if_recorded(Kind.SYNCHRONISATION, off_at, value=0.0)

    def was_hooked(self, hook: Any, state: object, at: Lines) -> None:
        """These lines gave a wrapper a communication hook."""
        self._append_if_recorded(Kind.HOOK, at, **facts_of_hook(hook, state))

    def were_made_before(self, calls: Sequence[Call]) -> None:
        """These calls were made before the model was watched."""
        self.calls.extend(calls[: MOST_CALLS // 2])

    @contextmanager
    def backward(
        self, roots: Sequence[Tensor], loss: float | None, own: Mapping[str, Tensor]
    ) -> Iterator[list[int | None]]:
        """The block is one backward pass from ``roots``. ``own``: gets the gradients that it
        computes, by parameter; empty if they are not added to ``.grad``. Yields a list that holds,
        after the block, how many collectives had been issued before it and at its end.
        """
        frame = sys._getframe(2)
        self._note_changes(frame, by_value=True)
        self.further.backward(roots)
        made_at = self._tracer.line_that_made(roots[0], frame) if len(roots) == 1 else None
        self._record(Kind.BACKWARD, frame, value=loss, made_at=made_at, callers=callers_of(frame))
        self.backwards += 1
        call = len(self.calls) - 1
        lines = lines_of(frame)
        paused, self._tracer.paused = self._tracer.paused, True
        self._in_backward = True
        issued = [issued_so_far()]
        try:
            yield issued
        finally:
            self._in_backward = False
            self.events.backward_ended()
            self._tracer.paused = paused
        issued.append(issued_so_far())
        if issued[0] is not None and issued[0] == issued[1]:
            for change in changed_by_hooks(self._gradients, own, self.calls[call:]):
                self._append(Kind.CHANGE, lines, change=change, in_backward=True)
        self._gradients.accept()
        self._states.note(call, tuple(self._gradients.parameters))

    def now(self) -> tuple[int, int, bool]:
        """The number of the step, how many calls of backward have begun, and whether one runs."""
        return self.step, self.backwards, self._in_backward

    def _on_loss(self, line: CodeLine, value: float, node: Any) -> None:
        if self._is_recorded():
            self._append(Kind.LOSS, (line, line), value=value, what=node.name())

    def _on_shuffle(self, frame: FrameType, what: str, seed: float | None) -> None:
        self._record(Kind.SHUFFLE, frame, value=seed, what=what)

    def _on_issue(self, issued: Issued, frame: FrameType) -> None:
        if not self._is_recorded():
            return
        self._note_changes(frame, by_value=True)
        collective = collective_call(
            issued,
            self._gradients.gradients,
            self._gradients.parameters,
            dict(self._model.named_buffers()),
        )
        self.further.parameters_go_out()
        if collective.contents is Contents.GRADIENTS:
            self._gradients.accept_these(collective.names, pending=True)
            issued.names = collective.names
        way = {"made_at": self.further.origin_of(issued.tensors), "callers": callers_of(frame)}
        self._record(Kind.COLLECTIVE, frame, collective=collective, **way)
        issued.call = len(self.calls) - 1
        if not self._tracer.paused:
            self._temporaries.add(issued, frame)

    def _on_wait(self, issued: Issued) -> None:
        if issued.names and self._is_recorded():
            self._gradients.accept_these(issued.names)
            self._states.note(issued.call, issued.names)

    def _in_frame(self, frame: FrameType, line: CodeLine | None, returned: object) -> None:
        if self._temporaries.waiting and line is not None:
            for number in self._temporaries.gone_after(frame):
                self._result_is_gone(number)
        self.further.values(frame, line, returned)
        if line is not None and line.function != "<module>":
            in_vain = self._in_vain.get(line, 0)
            if in_vain < MOST_IN_VAIN:
                found = self._losses.after_line(line, frame, returned)
                self._in_vain[line] = 0 if found else in_vain + 1

    def _result_is_gone(self, number: int) -> None:
        call = self.calls[number]
        if call.collective is not None:
            collective = replace(call.collective, result_is_gone=True)
            self.calls[number] = replace(call, collective=collective)

    def _after_line(self, line: CodeLine, by_value: bool) -> None:
        if not self._in_backward and self._is_recorded():
            self.further.after_line(line, by_value)
            for change in self._gradients.changes(by_value):
                way = callers_behind(line, sys._getframe(1))
                self._append_change((line, line), change, way)
            for flag in self._synchronisation.changes():
                self._append(Kind.SYNCHRONISATION, (line, line), value=float(flag))

    def _note_changes(self, frame: FrameType | None, by_value: bool) -> None:
        """Note what nobody has noticed after a line: it was done before ``frame`` goes on."""
        if self._in_backward:
            return
        for change in self._gradients.changes(by_value):
            self._append_change(lines_of(frame), replace(change, exact=False))

    def _append_change(
        self, lines: Lines, change: GradientChange, callers: tuple[CodeLine, ...] = ()
    ) -> None:
        """Record the change, together with the last one if the same line has made both."""
        names_now = change.names
        last = self.calls[-1] if self.calls else None
        if last is not None and last.change is not None and merged(last, lines[0], change):
            self.calls.pop()
            change = replace(change, names=last.change.names + change.names)
        self._append(Kind.CHANGE, lines, change=change, callers=callers)
        self._states.note(len(self.calls) - 1, names_now)

    def _is_recorded(self) -> bool:
        return os.getpid() == self._process and len(self.calls) < MOST_CALLS

    def _record(self, kind: Kind, frame: FrameType | None, **more: Any) -> None:
        self._append_if_recorded(kind, lines_of(frame), **more)

    def _append_if_recorded(self, kind: Kind, lines: Any, **more: Any) -> None:
        if self._is_recorded():
            self._append(kind, lines, **more)

    def _append(
        self,
        kind: Kind,
        lines: tuple[CodeLine | None, CodeLine | None],
        in_backward: bool = False,
        **more: Any,
    ) -> None:
        self.calls.append(
            Call(
                kind,
                *lines,
                step=self.step,
                backwards=self.backwards,
                in_backward=in_backward or self._in_backward,
                **more,
            )
        )


# Records where a step gets its examples, its weights and its loss from, with the lines.

MOST_LINES = 5_000
"""Only so many different lines of the user's code are remembered."""

Lines = tuple[CodeLine | None, CodeLine | None]


class FurtherCalls:
    """``append(kind, lines, ...)`` adds a call to those of the step.

    ``lines_run``: the steps and lines of the user's code that have run, each once, in the order of
    their first run; lines of the model's forward pass are not among them.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], append: Callable[..., None]
    ) -> None:
        self._step = 0
        self.lines_run: dict[tuple[int, CodeLine], None] = {}
        self._append = append
        self._names = {id(module): name for name, module in model.named_modules()}
        self._parameter_names = {id(one): name for name, one in parameters.items()}
        self._modules_seen: set[tuple[int, int]] = set()
        self._origins = TensorOrigins()
        self._indices = IndexLists(self._on_indices)
        self._graph = GraphLines()
        others = {name: one for name, one in model.named_parameters() if name not in parameters}
        self._weights = WeightWatch(parameters, others)
        self._weights_are_settled = False
        self._flags_are_settled = False
        self._compare_weights = False
        self._forward_lines: set[CodeLine] = set()

    @property
    def step(self) -> int:
        """The number of the step that runs."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._flags_are_settled = False
        if number and not self._weights_are_settled:
            self._weights.changed(by_value=True)  # what happens between steps is of no line

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        functions = RegisteringCalls(self._append, self._parameter_names).handlers()
        for code, is_active in RANDOM_AND_COUPLING.items():
            functions[code] = partial(self._on_module, is_active)
        return functions

    def values(self, frame: FrameType, line: CodeLine | None, returned: object) -> None:
        """A line of this frame has run; None: the frame begins."""
        self._origins.after(frame, line, returned)
        self._indices.after(frame, line, returned)

    def after_line(self, line: CodeLine, by_value: bool) -> None:
        """A line of the user's code has run; ``by_value`` as in ``WeightWatch.changed``."""
        key = self.step, line
        if key not in self.lines_run and len(self.lines_run) < MOST_LINES:
            self.lines_run[key] = None
        self._graph.after(line)
        if not self._flags_are_settled or _names_requires_grad(line.file, line.number):
            for required, names in self._weights.switched().items():
                what = f"requires_grad = {required}"
                self._append(Kind.REQUIRES_GRAD, (line, line), what=what, names=names)
        if not self._weights_are_settled:
            names, digest = self._weights.changed(by_value or self._compare_weights)
            self._compare_weights = False
            if names:
                way = callers_behind(line, sys._getframe(1))
                self._append(Kind.WEIGHTS, (line, line), what=digest, names=names, callers=way)

    def origin_of(self, tensors: Iterable[Tensor]) -> CodeLine | None:
        """The line that first held the first of these tensors that any line held."""
        lines = (self._origins.line_of(one) for one in tensors)
        return next((line for line in lines if line is not None), None)

    def parameters_go_out(self) -> None:
        """A collective that may write to the parameters, without a new version, is issued."""
        self._compare_weights = True

    def forward(self, frame: FrameType, arguments: object, examples: tuple[int, ...]) -> None:
        """The model is called. ``examples``: the positions of what it reads; () if not known."""
        self._weights_are_settled = self._flags_are_settled = True
        innermost, users = lines_of(frame)
        tensors = [
            one for one in leaves_of_arguments(arguments) if isinstance(one, Tensor) and one.ndim
        ]
        origins = [line for one in tensors if (line := self._origins.line_of(one)) is not None]
        line = origins[0] if origins else None
        if users is not None:
            self._forward_lines.add(users)
        self._append(Kind.READ, (line or innermost, line or users), examples=examples)

    def backward(self, roots: Iterable[Tensor]) -> None:
        """Backward begins at these tensors."""
        for line, functions in self._graph.of(roots, self._forward_lines).items():
            self._append(Kind.LOSS_FUNCTIONS, (line, line), what=functions)

    def _on_indices(self, line: CodeLine, name: str, numbers: tuple[int, ...]) -> None:
        self._append(Kind.INDICES, (line, line), what=name, examples=numbers)

    def _on_module(self, is_active: Callable[[FrameType], bool], frame: FrameType) -> None:
        module = frame.f_locals.get("self")
        key = self.step, id(module) if module is not None else hash(lines_of(frame))
        if key in self._modules_seen or not is_active(frame):
            return
        self._modules_seen.add(key)
        what = type(module).__name__ if module is not None else frame.f_code.co_name
        name = self._names.get(id(module), "")
        self._append(Kind.MODULE, lines_of(frame), what=what, names=(name,) if name else ())


@lru_cache(maxsize=4096)
def _names_requires_grad(file: str, number: int) -> bool:
    return "requires_grad" in linecache.getline(file, number)


# Records calls of torch's own functions: clipping, clearing, optimizers, groups, seeds, scales.

REGISTERING = (
    DistributedDataParallel.register_comm_hook,
    DistributedDataParallel._register_builtin_comm_hook,
)
"""The functions that give DDP a communication hook. A planted fault may replace them later."""


POINT_TO_POINT = (dist.send, dist.recv, dist.isend, dist.irecv)
"""The functions by which one rank sends a tensor to another one."""

_POINT_TO_POINT_CODES = frozenset(map(code_of, POINT_TO_POINT))


CLIPS_WITH_NORM = clip_grads_with_norm_
"""``clip_grad_norm_`` calls it as well, with the norm that it has found.

Source: torch 2.11 and 2.13, torch/nn/utils/clip_grad.py.
"""


class TorchCalls:
    """``record(kind, frame, ...)`` adds a call to those of the step. ``names``: id of a parameter
    -> its name.
    """

    def __init__(self, record: Callable[..., None], names: Mapping[int, str]) -> None:
        self._record = record
        self._names = names

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        functions: dict[Any, Handler] = {
            CLIPS_WITH_NORM: self._on_clip_by_norm,
            clip_grad.clip_grad_value_: self._on_clip_by_value,
            nn.Module.zero_grad: self._on_zero_grad,
            torch.optim.Optimizer.zero_grad: self._on_zero_grad,
            DistributedDataParallel.no_sync: self._on_no_sync,
            dist.new_group: self._on_new_group,
            torch.random.manual_seed: self._on_seed,
            torch.amp.GradScaler.scale: lambda frame: self._on_scale(Kind.SCALE, frame),
            torch.amp.GradScaler.unscale_: lambda frame: self._on_scale(Kind.UNSCALE, frame),
        }
        seeds_of_gpus = torch.cuda.manual_seed, torch.cuda.manual_seed_all
        functions |= dict.fromkeys(seeds_of_gpus, self._on_seed_of_gpus)
        functions |= dict.fromkeys(REGISTERING, self._on_hook)
        functions |= dict.fromkeys(sharding_functions(), self._on_sharding)
        functions |= dict.fromkeys(divide_factor_functions(), self._on_divide_factor)
        functions |= dict.fromkeys(POINT_TO_POINT, self._on_point_to_point)
        for name in dir(torch.optim):
            kind = getattr(torch.optim, name)
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                functions[kind.step] = self._on_optimizer_step
        return {code_of(function): handler for function, handler in functions.items()}

    def _on_clip_by_norm(self, frame: FrameType) -> None:
        most, norm = frame.f_locals["max_norm"], frame.f_locals["total_norm"]
        if type(norm) is Tensor:  # a sharded one is not: its ranks would have to add it up
            norm = float(norm)
        self._on_clip(frame, most, norm if isinstance(norm, float) else None, _clipping(frame))

    def _on_clip_by_value(self, frame: FrameType) -> None:
        self._on_clip(frame, frame.f_locals["clip_value"], None, frame.f_code.co_name)

    def _on_clip(self, frame: FrameType, most: Any, norm: float | None, what: str) -> None:
        parameters = frame.f_locals["parameters"]
        if isinstance(parameters, Sequence) and not parameters:
            return  # nothing is clipped
        names, way = self._names_of(parameters), callers_of(frame)
        self._record(
            Kind.CLIP, frame, value=float(most), norm=norm, what=what, names=names, callers=way
        )

    def _on_zero_grad(self, frame: FrameType) -> None:
        owner = frame.f_locals["self"]
        if isinstance(owner, nn.Module):
            parameters: Any = list(owner.parameters())
        else:
            parameters = _of_optimizer(owner)
        if lines_of(frame)[0] is not None:  # the suite clears gradients itself, before each step
            names, way = self._names_of(parameters), callers_of(frame)
            self._record(Kind.ZERO_GRAD, frame, names=names, callers=way)

    def _on_optimizer_step(self, frame: FrameType) -> None:
        optimizer = frame.f_locals["self"]
        self._record(
            Kind.OPTIMIZER_STEP,
            frame,
            what=type(optimizer).__name__,
            names=self._names_of(_of_optimizer(optimizer)),
        )

    def _on_new_group(self, frame: FrameType) -> None:
        given = frame.f_locals.get("ranks")
        ranks = range(dist.get_world_size()) if given is None else given
        ranks = tuple(map(int, ranks))
        self._record(Kind.NEW_GROUP, frame, ranks=ranks, callers=callers_of(frame))

    def _on_no_sync(self, frame: FrameType) -> None:
        if len(frame.f_locals) == 1:  # later the generator goes on, with more variables
            self._record(Kind.NO_SYNC, frame.f_back, callers=callers_of(frame))

    def _on_point_to_point(self, frame: FrameType) -> None:
        outer = frame.f_back
        while outer is not None and not is_shown(outer.f_code.co_filename):
            if outer.f_code in _POINT_TO_POINT_CODES:
                return  # recv calls irecv
            outer = outer.f_back
        self._record(
            Kind.POINT_TO_POINT, frame, what=frame.f_code.co_name, callers=callers_of(frame)
        )

    def _on_seed(self, frame: FrameType) -> None:
        self._record(Kind.SEED, frame, value=float(int(frame.f_locals["seed"])))

    def _on_seed_of_gpus(self, frame: FrameType) -> None:
        caller = frame.f_back  # torch.manual_seed seeds the GPUs, too, and so does this package
        if caller is not None and is_shown(caller.f_code.co_filename):
            self._on_seed(frame)

    def _on_hook(self, frame: FrameType) -> None:
        hook = frame.f_locals.get("hook", frame.f_locals.get("comm_hook_type"))
        self._record(Kind.HOOK, frame, **facts_of_hook(hook, frame.f_locals.get("state")))

    def _on_sharding(self, frame: FrameType) -> None:
        module = frame.f_locals.get("module")
        if isinstance(module, nn.Module):
            name = frame.f_code.co_name
            self._record(
                Kind.SHARDING,
                frame,
                what="FullyShardedDataParallel" if name == "__init__" else name,
                names=parameters_of(module, self._names, ignored_among(frame.f_locals)),
                ranks=ranks_of(frame.f_locals),
            )

    def _on_divide_factor(self, frame: FrameType) -> None:
        value = float(frame.f_locals["factor"])
        self._record(Kind.DIVIDE_FACTOR, frame, value=value, what=frame.f_code.co_name)

    def _on_scale(self, kind: Kind, frame: FrameType) -> None:
        scaler = frame.f_locals["self"]
        self._record(kind, frame, value=float(scaler.get_scale()))

    def _names_of(self, parameters: Any) -> tuple[str, ...]:
        """The names of the model's parameters among these. An iterator is left as it is."""
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        if isinstance(parameters, nn.Module):
            parameters = list(parameters.parameters())
        if not isinstance(parameters, Sequence):
            return ()
        return tuple(self._names[id(one)] for one in parameters if id(one) in self._names)


def _clipping(frame: FrameType) -> str:
    """The public function that clips by the norm: this frame's own, or the one that called it."""
    outer: FrameType | None = frame
    while outer is not None and not is_shown(outer.f_code.co_filename):
        if outer.f_code.co_name == "clip_grad_norm_":
            return "clip_grad_norm_"
        outer = outer.f_back
    return "clip_grads_with_norm_"


def facts_of_hook(hook: Any, state: object) -> dict[str, Any]:
    """What is recorded of a communication hook, as the fields of a ``Call``."""
    return {
        "what": getattr(hook, "__name__", str(hook)),
        "made_at": beginning_of(hook),
        "numbers": _numbers_of(owner_of_numbers(hook, state)),
        "hook_state": state_of_hook(hook, state),
    }


def _of_optimizer(optimizer: Any) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _numbers_of(state: object) -> tuple[tuple[str, float], ...]:
    """The attributes of an object that are plain numbers."""
    return tuple(
        (name, float(value))
        for name, value in attributes_of_hook(state).items()
        if type(value) in (int, float)
    )


# Records which lines make samplers and loaders, and register hooks of tensors and modules.

REGISTERING_HOOKS: tuple[Any, ...] = (
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_forward_hook,
)


class RegisteringCalls:
    """``append(kind, lines, ...)`` adds a call. ``names``: id of a parameter -> its name."""

    def __init__(self, append: Callable[..., None], names: Mapping[int, str]) -> None:
        self._append = append
        self._names = names

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        functions: dict[CodeType, Handler] = {
            code: partial(self._on_data, describe) for code, describe in DATA_FUNCTIONS.items()
        }
        for registering in REGISTERING_HOOKS:
            functions[registering.__code__] = self._on_hook
        return functions

    def _on_data(self, describe: Callable[[FrameType], Described], frame: FrameType) -> None:
        lines = lines_of(frame)
        if lines[0] is not None:
            kind, what, value = describe(frame)
            made_at, length = own_sampler(frame), own_length(frame)
            self._append(kind, lines, what=what, value=value, made_at=made_at, chosen_at=length)

    def _on_hook(self, frame: FrameType) -> None:
        owner = frame.f_locals["self"]
        name = self._names.get(id(owner))
        lines = lines_of(frame)
        known = name is not None or isinstance(owner, nn.Module) or _is_of_user(frame)
        if _is_called_again(frame):
            return
        if known and lines[0] is not None:  # the suite registers hooks of its own
            self._append(
                Kind.TENSOR_HOOK,
                lines,
                what=frame.f_code.co_name,
                names=(name,) if name is not None else (),
                made_at=beginning_of(frame.f_locals.get("hook")),
            )


def _is_of_user(frame: FrameType) -> bool:
    return frame.f_back is not None and is_users(frame.f_back.f_code.co_filename)


def _is_called_again(frame: FrameType) -> bool:
    """True where a mode of the suite has called the function a second time."""
    return frame.f_back is not None and frame.f_back.f_code.co_name == "__torch_function__"


# Notices the lines that switch the synchronisation of DistributedDataParallel on or off.


class SynchronisationWatch:
    """Remembers the flag of every wrapper, by a weak reference, so that the step can free it."""

    def __init__(self) -> None:
        self._flags: list[tuple[weakref.ref[DistributedDataParallel], list[bool]]] = []

    def add(self, ddp: DistributedDataParallel) -> None:
        """Watch this wrapper, from how its flag is now. A new wrapper synchronises."""
        self._flags.append((weakref.ref(ddp), [bool(ddp.require_backward_grad_sync)]))

    def changes(self) -> Iterator[bool]:
        """The flags that have changed since the last call, as they are now."""
        for reference, last in self._flags:
            ddp = reference()
            if ddp is not None and bool(ddp.require_backward_grad_sync) != last[0]:
                last[0] = not last[0]
                yield last[0]


# Notices collectives whose result nobody can use, since nothing holds it once the line has run.

IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
"""The collectives that write their result to the tensor that goes in."""


class TemporaryResults:
    """``waiting``: true while a line has issued a collective and has not ended.

    The memory of a tensor is what is watched: a view of a tensor may go away, and its memory stay.
    """

    def __init__(self) -> None:
        self._issued: dict[int, list[tuple[int, tuple[StorageWeakRef, ...]]]] = {}
        """id of the frame that issued them -> the numbers of the calls, and what they write to."""

    @property
    def waiting(self) -> bool:
        return bool(self._issued)

    def add(self, issued: Issued, frame: FrameType | None) -> None:
        """This collective is issued by the innermost of the user's lines in these frames."""
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or issued.op not in IN_PLACE or issued.asynchronous:
            return
        memory = tuple(StorageWeakRef(one.untyped_storage()) for one in issued.tensors)
        self._issued.setdefault(id(frame), []).append((issued.call, memory))

    def gone_after(self, frame: FrameType) -> list[int]:
        """A line of this frame has ended: the calls it made whose results nothing holds now."""
        of_frame = self._issued.pop(id(frame), [])
        return [call for call, memory in of_frame if all(one.expired() for one in memory)]
