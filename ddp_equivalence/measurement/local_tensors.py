"""Keeps samples of the tensors that the user's lines make once a backward pass has run."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.trace import LocalTensor, packed, thinned

MOST_TENSORS = 400
"""So many samples are kept of a rank."""

MOST_KEPT = 64
"""So many elements are kept of a tensor, at equal distances."""

FEWEST, MOST_ELEMENTS = 4, 1_000_000
"""Smaller and larger tensors are not looked at."""

MOST_ATTRIBUTES = 50
"""Of an object with more attributes, none is looked at."""

MOST_ENTRIES = 8
"""Of a list, only so many entries are looked at."""


class LocalTensors:
    """The local variables of functions, the entries of lists among them, attributes of ``self``,
    and what functions return. Later tensors than the first ``MOST_TENSORS`` are left out.
    """

    def __init__(self) -> None:
        self.found: list[LocalTensor] = []
        self._known: dict[tuple[int, str], tuple[int, int]] = {}
        self._values: dict[tuple[str, str], bytes] = {}

    def forget(self) -> None:
        """Look at every tensor again: a collective may have changed it without a new version."""
        self._known.clear()

    def after(self, frame: FrameType, line: CodeLine | None, returned: object, step: int) -> None:
        """This line of the frame has run. This is called after every line, so it must be quick."""
        if line is None or len(self.found) >= MOST_TENSORS:
            return
        named = [*_named(frame), *([("", returned)] if type(returned) is Tensor else [])]
        for name, value in named:
            try:
                self._see(frame, line, name, value, step)
            except Exception:  # a tensor of inference mode, or without values of its own
                continue

    def _see(self, frame: FrameType, line: CodeLine, name: str, value: Tensor, step: int) -> None:
        key, state = (id(frame), name), (id(value), value._version)
        if self._known.get(key) == state:
            return
        self._known[key] = state
        if not FEWEST <= value.numel() <= MOST_ELEMENTS or not value.is_floating_point():
            return
        sample = packed(thinned(value.detach().reshape(-1), MOST_KEPT))
        place = line.function, name
        if self._values.get(place) != sample:
            self._values[place] = sample
            self.found.append(LocalTensor(step, line, name, sample, value.numel()))


def _named(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a frame, each with the name that the code has for it."""
    for name, value in frame.f_locals.items():
        if type(value) is Tensor:
            yield name, value
        elif type(value) in (list, tuple) and value and type(value[0]) is Tensor:
            entries = ((f"{name}[{at}]", one) for at, one in enumerate(value[:MOST_ENTRIES]))
            yield from (entry for entry in entries if type(entry[1]) is Tensor)
    owner = frame.f_locals.get("self")
    attributes = getattr(owner, "__dict__", {}) if not isinstance(owner, nn.Module) else {}
    if len(attributes) <= MOST_ATTRIBUTES:
        for name, value in attributes.items():
            if type(value) is Tensor:
                yield f"self.{name}", value
