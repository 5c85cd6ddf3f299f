"""Records the calls of a step that matter for its gradients."""

from __future__ import annotations

import inspect
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
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, clip_grads_with_norm_
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    Contents,
    GradientChange,
    Kind,
    Trace,
    beginning_of,
    callers_behind,
    callers_of,
    is_shown,
    is_users,
    leaves_of_arguments,
    line_that_named,
    lines_of,
)
from ddp_equivalence.measurement.declared_equal import DeclaredEqual
from ddp_equivalence.measurement.draws import (
    RANDOM_AND_COUPLING,
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
    hook_functions,
    ignored_among,
    parameters_of,
    ranks_of,
    reduce_dtype_among,
    replicating_functions,
    sharding_functions,
    synchronisation_functions,
)
from ddp_equivalence.ranks.collectives import Issued, issued_so_far, listening

MOST_CALLS = 5_000  # later ones are not recorded
MOST_IN_VAIN = 20
"""A line after which no loss was found so often is not looked at again: long loops stay fast."""


Lines = tuple[CodeLine | None, CodeLine | None]

MOST_LINES = 5_000
"""Only so many different lines of the user's code are remembered."""


class CallWatch:
    """Records what one rank's step does with the gradients of ``model``.

    ``sample``: the elements of each gradient that are kept. The caller says when the model is
    called, when backward runs and when a step begins. ``backwards``: the calls of backward that
    have begun in this step. ``lines_run``: the steps and lines of the user's code that have run,
    each once, in the order of their first run; lines of the model's forward pass are not among
    them. ``inside_model``: also follow these, since a script may compute its loss there.
    """

    def __init__(
        self, model: nn.Module, sample: ElementSample[str], inside_model: bool = False
    ) -> None:
        self._inside_model = inside_model
        self.step = 0
        self.calls: list[Call] = []
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._gradients = GradientWatch(model, sample, self._names)
        self._states = StateLog(self._gradients)
        self._losses = LossWatch(self._on_loss)
        self._in_vain: dict[CodeLine, int] = {}
        self._synchronisation = SynchronisationWatch()
        self.lines_run: dict[tuple[int, CodeLine], None] = {}
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._modules_seen: set[tuple[int, int]] = set()
        self._origins = TensorOrigins()
        self._graph = GraphLines()
        kept = self._gradients.parameters
        others = {name: one for name, one in model.named_parameters() if name not in kept}
        self._weights = WeightWatch(kept, others)
        self._weights_are_settled = self._flags_are_settled = self._compare_weights = False
        self._forward_lines: set[CodeLine] = set()
        modules: dict[CodeType, Handler] = {
            code: partial(self._on_module, active) for code, active in RANDOM_AND_COUPLING.items()
        }
        is_replaced = self._gradients.is_replaced
        torchs = TorchCalls(self._append_if_recorded, self._names, is_replaced).handlers()
        shuffles = {code_of(f): one for f, one in shuffle_handlers(self._on_shuffle).items()}
        self.events = LineEvents(model, self.now, self.calls, self._append_if_recorded)
        events = self.events.handlers()
        declared = DeclaredEqual(self._append_if_recorded).handlers()
        handlers = merged_handlers(modules, torchs, shuffles, events, declared)
        self._tracer = LineTracer(handlers, self._after_line, self._in_frame)
        self.events.attach(self._tracer, self._gradients)
        self.backwards = 0
        self._in_backward = False
        self._process = os.getpid()

    def begin_step(self, number: int) -> None:
        """Everything that is recorded from now on belongs to this step."""
        self.step, self.backwards = number, 0
        self.events.begin_step()
        self._flags_are_settled = False
        if number and not self._weights_are_settled:
            self._weights.changed(by_value=True)  # what happens between steps is of no line

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
            self._gradients.recorded(),
            self._tracer.tracing(running),
        ):
            yield
        self._note_changes(None)

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

    def reads(self, frame: FrameType, arguments: object, examples: tuple[int, ...]) -> None:
        """The model is called. ``examples``: the positions of what it reads; () if not known."""
        self._weights_are_settled = self._flags_are_settled = True
        innermost, users = lines_of(frame)
        tensors = [one for one in leaves_of_arguments(arguments) if isinstance(one, Tensor)]
        origins = filter(None, (self._origins.line_of(one) for one in tensors if one.ndim))
        line = next(origins, None)
        if users is not None:
            self._forward_lines.add(users)
        self._append(Kind.READ, (line or innermost, line or users), examples=examples)

    def was_wrapped(self, ddp: DistributedDataParallel, at: Lines, off_at: Lines | None) -> None:
        """A wrapper was made by these lines; ``off_at`` have switched synchronisation off."""
        names, ranks = parameters_of(ddp.module, self._names), ranks_of(vars(ddp))
        self._append_if_recorded(Kind.WRAP, at, what=type(ddp).__name__, names=names, ranks=ranks)
        self._synchronisation.add(ddp)
        if off_at is not None:
            self._append_if_recorded(Kind.SYNCHRONISATION, off_at, value=0.0)

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
        self._note_changes(frame)
        for line, functions in self._graph.of(roots, self._forward_lines).items():
            self._append(Kind.LOSS_FUNCTIONS, (line, line), names=functions)
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

    def sharded(self) -> set[str]:
        """The parameters whose places shards have taken."""
        return self._gradients.sharded()

    @property
    def parts(self) -> dict[str, bytes]:
        """Of each gradient that is sharded: which of the sampled elements are on this rank."""
        return self._gradients.parts

    def now(self) -> tuple[int, int, bool]:
        """The number of the step, how many calls of backward have begun, and whether one runs."""
        return self.step, self.backwards, self._in_backward

    def _on_loss(self, line: CodeLine, value: float, node: Any) -> None:
        if self._is_recorded():
            self._append(Kind.LOSS, (line, line), value=value, what=node.name())

    def _on_module(self, is_active: Callable[[FrameType], bool], frame: FrameType) -> None:
        module = frame.f_locals.get("self")
        key = self.step, id(module) if module is not None else hash(lines_of(frame))
        if key in self._modules_seen or not is_active(frame):
            return
        self._modules_seen.add(key)
        what = type(module).__name__ if module is not None else frame.f_code.co_name
        name = self._module_names.get(id(module), "")
        self._append(Kind.MODULE, lines_of(frame), what=what, names=(name,) if name else ())

    def _on_shuffle(self, frame: FrameType, what: str, seed: float | None) -> None:
        self._record(Kind.SHUFFLE, frame, value=seed, what=what)

    def _on_issue(self, issued: Issued, frame: FrameType) -> None:
        if not self._is_recorded():
            return
        self._note_changes(frame)
        collective = collective_call(
            issued,
            self._gradients.gradients,
            self._gradients.parameters,
            dict(self._model.named_buffers()),
        )
        self._compare_weights = True  # it may write to the parameters without a new version
        if collective.contents is Contents.GRADIENTS:
            self._gradients.accept_these(collective.names, pending=True)
            issued.names = collective.names
        origins = filter(None, map(self._origins.line_of, issued.tensors))
        way = {"made_at": next(origins, None), "callers": callers_of(frame)}
        self._record(Kind.COLLECTIVE, frame, collective=collective, **way)
        issued.call = len(self.calls) - 1

    def _on_wait(self, issued: Issued) -> None:
        if issued.names and self._is_recorded():
            self._gradients.accept_these(issued.names)
            self._states.note(issued.call, issued.names)

    def _in_frame(self, frame: FrameType, line: CodeLine | None, returned: object) -> None:
        self._origins.after(frame, line, returned)
        if line is not None and line.function != "<module>":
            in_vain = self._in_vain.get(line, 0)
            if in_vain < MOST_IN_VAIN:
                found = self._losses.after_line(line, frame, returned)
                self._in_vain[line] = 0 if found else in_vain + 1

    def _after_line(self, line: CodeLine, by_value: bool) -> None:
        if not self._in_backward and self._is_recorded():
            self._note_flags_and_weights(line, by_value)
            for change in self._gradients.changes(by_value):
                way = callers_behind(line, sys._getframe(1))
                self._append_change((line, line), change, way)
            for flag in self._synchronisation.changes():
                self._append(Kind.SYNCHRONISATION, (line, line), value=float(flag))

    def _note_flags_and_weights(self, line: CodeLine, by_value: bool) -> None:
        key = self.step, line
        if key not in self.lines_run and len(self.lines_run) < MOST_LINES:
            self.lines_run[key] = None
        self._graph.after(line)
        if not self._flags_are_settled or _names_requires_grad(line.file, line.number):
            for required, names in self._weights.switched().items():
                self._append(Kind.REQUIRES_GRAD, (line, line), value=float(required), names=names)
        if not self._weights_are_settled:
            names, digest = self._weights.changed(by_value or self._compare_weights)
            self._compare_weights = False
            if names:
                way = callers_behind(line, sys._getframe(1))
                self._append(Kind.WEIGHTS, (line, line), what=digest, names=names, callers=way)

    def _note_changes(self, frame: FrameType | None) -> None:
        """Note what nobody has noticed after a line: it was done before ``frame`` goes on."""
        for change in () if self._in_backward else self._gradients.changes(by_value=True):
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


@lru_cache(maxsize=4096)
def _names_requires_grad(file: str, number: int) -> bool:
    return "requires_grad" in linecache.getline(file, number)


# Records calls of torch's own functions: clipping, clearing, optimizers, groups, samplers, hooks.

Facts = Callable[[FrameType], dict[str, Any] | None]
"""The fields of the call of which a frame begins; None if it is not recorded."""

REGISTERING = (
    DistributedDataParallel.register_comm_hook,
    DistributedDataParallel._register_builtin_comm_hook,
)
"""The functions that give DDP a communication hook. A planted fault may replace them later."""

IGNORING = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model

REGISTERING_HOOKS: tuple[Any, ...] = (
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_forward_hook,
)
"""The functions that give a tensor or a module a hook."""

POINT_TO_POINT = (dist.send, dist.recv, dist.isend, dist.irecv)
"""The functions by which one rank sends a tensor to another one."""

_warning = getattr(dist.distributed_c10d, "_warn_not_in_group", None)
WARNING_OF_NON_MEMBERS = () if _warning is None else (_warning,)
"""The function, which is not public, that torch calls where a collective does nothing on a rank
outside of its group. Source: torch 2.13, torch/distributed/distributed_c10d.py."""

_POINT_TO_POINT_CODES = frozenset(map(code_of, POINT_TO_POINT))

CLIPS_WITH_NORM = clip_grads_with_norm_
"""``clip_grad_norm_`` calls it as well, with the norm that it has found.

Source: torch 2.11 and 2.13, torch/nn/utils/clip_grad.py.
"""

OF_THE_SUITE_TOO = frozenset(
    {Kind.ZERO_GRAD, Kind.TENSOR_HOOK, Kind.SAMPLER, Kind.LOADER, Kind.IGNORE}
)
"""The suite makes such calls itself, which no line of the user's or of another package leads to."""


def subclasses_of(kind: type[Any]) -> Iterator[type[Any]]:
    """All classes that are made of this one so far."""
    for subclass in type.__subclasses__(kind):
        yield subclass
        yield from subclasses_of(subclass)


class TorchCalls:
    """``append(kind, lines, ...)`` adds a call to those of the step. ``names``: id of a parameter
    -> its name. ``is_replaced(name, parameter)``: whether a shard has taken its place.
    """

    def __init__(
        self,
        append: Callable[..., None],
        names: Mapping[int, str],
        is_replaced: Callable[[str, object], bool] = lambda name, parameter: False,
    ) -> None:
        self._append = append
        self._names = names
        self._is_replaced = is_replaced
        self._names_in: dict[tuple[int, bool], tuple[str, ...]] = {}
        self._steps: frozenset[CodeType] = frozenset()

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        optimizers: list[type[Any]] = [Optimizer, *subclasses_of(Optimizer)]
        steps = [one.step for one in optimizers]
        steps = [one for one in steps if inspect.isfunction(inspect.unwrap(one))]
        self._steps = frozenset(map(code_of, steps))
        recorded: list[tuple[Kind, Facts, Iterable[Any]]] = [
            (Kind.CLIP, self._clip, (CLIPS_WITH_NORM, clip_grad.clip_grad_value_)),
            (Kind.ZERO_GRAD, self._owned, (nn.Module.zero_grad, Optimizer.zero_grad)),
            (Kind.OPTIMIZER, _made, (Optimizer.__init__,)),
            (Kind.JOIN, _joined, (Join.__init__,)),
            (Kind.REPLICATE, lambda frame: {}, replicating_functions()),
            (Kind.OPTIMIZER_STEP, self._stepped, steps),
            (Kind.NO_SYNC, _no_sync, (DistributedDataParallel.no_sync,)),
            (Kind.NEW_GROUP, _new_group, (dist.new_group,)),
            (Kind.POINT_TO_POINT, _point_to_point, POINT_TO_POINT),
            (Kind.NOT_IN_GROUP, _not_in_group, WARNING_OF_NON_MEMBERS),
            (Kind.SEED, _seed, (torch.random.manual_seed,)),
            (Kind.SEED, _seed_of_gpus, (torch.cuda.manual_seed, torch.cuda.manual_seed_all)),
            (Kind.SCALE, _scale, (torch.amp.GradScaler.scale,)),
            (Kind.UNSCALE, _scale, (torch.amp.GradScaler.unscale_,)),
            (Kind.HOOK, _hook, (*REGISTERING, *hook_functions())),
            (Kind.SHARDING, self._sharding, sharding_functions()),
            (Kind.DIVIDE_FACTOR, _divide_factor, divide_factor_functions()),
            (Kind.SYNCHRONISATION, self._synchronisation, synchronisation_functions()),
            (Kind.SAMPLER, _sampler, (DistributedSampler.__init__,)),
            (Kind.LOADER, _loader, (DataLoader.__init__,)),
            (Kind.IGNORE, lambda frame: {}, (IGNORING,)),
            (Kind.TENSOR_HOOK, self._tensor_hook, REGISTERING_HOOKS),
        ]
        return {
            code_of(function): partial(self._on_call, kind, facts)
            for kind, facts, functions in recorded
            for function in functions
        }

    def _on_call(self, kind: Kind, facts: Facts, frame: FrameType) -> None:
        lines = lines_of(frame)
        found = facts(frame) if lines[0] is not None or kind not in OF_THE_SUITE_TOO else None
        if found is not None:
            self._append(kind, lines, callers=callers_of(frame), **found)

    def _clip(self, frame: FrameType) -> dict[str, Any] | None:
        given = frame.f_locals
        parameters, norm = given["parameters"], given.get("total_norm")
        if isinstance(parameters, Sequence) and not parameters:
            return None  # nothing is clipped
        if type(norm) is Tensor:  # a sharded one is not: its ranks would have to add it up
            norm = float(norm)
        return {
            "value": float(given["max_norm"] if "max_norm" in given else given["clip_value"]),
            "norm": norm if isinstance(norm, float) else None,
            "what": _clipping(frame),
            "names": self._names_of(parameters),
        }

    def _owned(self, frame: FrameType) -> dict[str, Any]:
        """The parameters of a module or an optimizer, of which the value is the learning rate."""
        owner: Any = frame.f_locals["self"]
        if isinstance(owner, nn.Module):
            return {"names": self._names_of(owner)}
        parameters = [one for group in owner.param_groups for one in group["params"]]
        rate = owner.param_groups[0].get("lr")
        rate = float(rate) if isinstance(rate, int | float | Tensor) else None
        names, what = self._names_of(parameters), type(owner).__name__
        return {"names": names, "what": what, "value": rate}

    def _stepped(self, frame: FrameType) -> dict[str, Any] | None:
        """The parameters of an optimizer; None for one that another one steps."""
        outer = frame.f_back
        while outer is not None:
            if outer.f_code in self._steps:
                return None
            outer = outer.f_back
        groups = frame.f_locals["self"].param_groups
        named = [(self._names.get(id(one)), one) for group in groups for one in group["params"]]
        replaced = tuple(name for name, one in named if name and self._is_replaced(name, one))
        if replaced:
            self._append(Kind.REPLACED, lines_of(frame), names=replaced)
        return self._owned(frame)

    def _synchronisation(self, frame: FrameType) -> dict[str, Any]:
        module, given = frame.f_locals["self"], frame.f_locals
        recurse = bool(given.get("recurse", True))
        # Between two passes the gathered weights, which have other ids, may be in their places.
        key, names = (id(module), recurse), self._names_of([*module.parameters(recurse=recurse)])
        names = self._names_in[key] = names or self._names_in.get(key, ())
        return {"value": float(bool(given["requires_gradient_sync"])), "names": names}

    def _sharding(self, frame: FrameType) -> dict[str, Any] | None:
        module, name = frame.f_locals.get("module"), frame.f_code.co_name
        if not isinstance(module, nn.Module):
            return None
        ignored = ignored_among(frame.f_locals)
        left_out = tuple(self._names[one] for one in self._names if one in ignored)
        if left_out:
            self._append(Kind.IGNORE, lines_of(frame), names=left_out)
        return {
            "what": "FullyShardedDataParallel" if name == "__init__" else name,
            "names": parameters_of(module, self._names, ignored),
            "ranks": ranks_of(frame.f_locals),
            "dtype": reduce_dtype_among(frame.f_locals),
        }

    def _tensor_hook(self, frame: FrameType) -> dict[str, Any] | None:
        owner, caller = frame.f_locals["self"], frame.f_back
        if caller is not None and caller.f_code.co_name == "__torch_function__":
            return None  # a mode of the suite has called the function a second time
        name = self._names.get(id(owner))
        by_user = caller is not None and is_users(caller.f_code.co_filename)
        if name is None and not isinstance(owner, nn.Module) and not by_user:
            return None
        made_at = beginning_of(frame.f_locals.get("hook"))
        by_torch = caller is None or not is_shown(caller.f_code.co_filename)
        if by_torch and (made_at is None or not is_shown(made_at.file)):
            return None  # such as those that FSDP gives to what a module returns
        return {
            "what": frame.f_code.co_name,
            "names": () if name is None else (name,),
            "made_at": made_at,
        }

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
    """The public function that clips: this frame's own, or the one that called it."""
    outer: FrameType | None = frame
    while outer is not None and not is_shown(outer.f_code.co_filename):
        if outer.f_code.co_name == "clip_grad_norm_":
            return "clip_grad_norm_"
        outer = outer.f_back
    return frame.f_code.co_name.removeprefix("_")


def _made(frame: FrameType) -> dict[str, Any]:
    return {"what": type(frame.f_locals["self"]).__name__}


def _joined(frame: FrameType) -> dict[str, Any]:
    given = frame.f_locals.get("kwargs", {})
    return {"value": float(bool(given.get("divide_by_initial_world_size", True)))}


def _new_group(frame: FrameType) -> dict[str, Any]:
    given = frame.f_locals.get("ranks")
    return {"ranks": tuple(map(int, range(dist.get_world_size()) if given is None else given))}


def _no_sync(frame: FrameType) -> dict[str, Any] | None:
    # Later the generator goes on, with more variables.
    return {} if len(frame.f_locals) == 1 else None


def _point_to_point(frame: FrameType) -> dict[str, Any] | None:
    outer = frame.f_back
    while outer is not None and not is_shown(outer.f_code.co_filename):
        if outer.f_code in _POINT_TO_POINT_CODES:
            return None  # recv calls irecv
        outer = outer.f_back
    return {"what": frame.f_code.co_name}


def _not_in_group(frame: FrameType) -> dict[str, Any] | None:
    """A barrier, or a collective of single numbers, has nothing to do with gradients."""
    given = pytree.tree_leaves(dict(frame.f_back.f_locals)) if frame.f_back is not None else []
    tensors = [one for one in given if isinstance(one, Tensor) and one.is_floating_point()]
    if not any(one.numel() > 1 for one in tensors):
        return None
    return {"what": str(frame.f_locals.get("op_name", "a collective"))}


def _seed(frame: FrameType) -> dict[str, Any]:
    return {"value": float(int(frame.f_locals["seed"]))}


def _seed_of_gpus(frame: FrameType) -> dict[str, Any] | None:
    caller = frame.f_back  # torch.manual_seed seeds the GPUs, too, and so does this package
    return _seed(frame) if caller is not None and is_shown(caller.f_code.co_filename) else None


def _scale(frame: FrameType) -> dict[str, Any]:
    return {"value": float(frame.f_locals["self"].get_scale())}


def _divide_factor(frame: FrameType) -> dict[str, Any]:
    return {"value": float(frame.f_locals["factor"]), "what": frame.f_code.co_name}


def _hook(frame: FrameType) -> dict[str, Any]:
    hook: Any = frame.f_locals.get("hook", frame.f_locals.get("comm_hook_type"))
    return {"what": getattr(hook, "__name__", str(hook)), "made_at": beginning_of(hook)}


def _sampler(frame: FrameType) -> dict[str, Any]:
    """The value is the length of the data set."""
    given = frame.f_locals
    count, rank = given.get("num_replicas"), given.get("rank")
    numbers = {
        "num_replicas": dist.get_world_size() if count is None else count,
        "rank": dist.get_rank() if rank is None else int(rank),
        "shuffle": given.get("shuffle"),
        "drop_last": given.get("drop_last"),
    }
    return _of_data(given, numbers, [f"{name}={value}" for name, value in numbers.items()])


def _loader(frame: FrameType) -> dict[str, Any]:
    """The value is the length of the data set. ``made_at``: where a class of the user's, which
    gives the loader its order, begins to do so.
    """
    given = frame.f_locals
    samplers = [name for name in ("sampler", "batch_sampler") if given.get(name) is not None]
    of_user = (getattr(type(given[name]), "__iter__", None) for name in samplers)
    numbers = {name: given.get(name) for name in ("batch_size", "shuffle", "drop_last")}
    numbers["takes_sampler"] = not samplers and not isinstance(given["dataset"], IterableDataset)
    shown = [] if "batch_sampler" in samplers else [f"batch_size={given.get('batch_size')}"]
    shown += [f"{name}={type(given[name]).__name__}" for name in samplers]
    shown += [f"{name}=True" for name in ("shuffle", "drop_last") if given.get(name)]
    made_at = next(filter(None, map(beginning_of, of_user)), None)
    return {**_of_data(given, numbers, shown), "made_at": made_at}


def _of_data(
    given: Mapping[str, Any], numbers: Mapping[str, Any], shown: Sequence[str]
) -> dict[str, Any]:
    try:
        length = float(len(given["dataset"]))
    except TypeError:  # a data set that is only iterated
        length = 0.0
    return {
        "what": f"{type(given['self']).__name__}({', '.join(shown)})",
        "value": length,
        "numbers": tuple((name, float(one)) for name, one in numbers.items() if one is not None),
    }


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
