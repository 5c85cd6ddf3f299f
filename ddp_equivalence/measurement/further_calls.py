"""Records where a step gets its examples, its weights and its loss from, with the lines."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from types import CodeType, FrameType

from torch import Tensor, nn

from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.measurement.code_lines import callers_behind, lines_of
from ddp_equivalence.measurement.graph_lines import GraphLines
from ddp_equivalence.measurement.index_lists import IndexLists
from ddp_equivalence.measurement.line_tracer import Handler
from ddp_equivalence.measurement.plain_tensors import leaves_of
from ddp_equivalence.measurement.random_modules import RANDOM_AND_COUPLING
from ddp_equivalence.measurement.registering_calls import RegisteringCalls
from ddp_equivalence.measurement.tensor_origins import TensorOrigins
from ddp_equivalence.measurement.weight_watch import WeightWatch

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
        tensors = [one for one in leaves_of(arguments) if isinstance(one, Tensor) and one.ndim]
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
