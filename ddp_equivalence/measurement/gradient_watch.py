"""Notices what becomes of gradients, weights and buffers while a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import FrameType

import torch
from torch import Tensor, nn

from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.comparison.gradients import ElementSample, digest
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    CollectiveCall,
    GradientChange,
    GradientState,
    Kind,
    NotPlain,
    callers_of,
    line_at,
    packed,
    plain,
    thinned,
)
from ddp_equivalence.measurement.lines import may_hide
from ddp_equivalence.measurement.sharded_gradients import (
    GradientsHere,
    GradientVersion,
    Kept,
    thinned_part,
)

SAME_FACTOR = 1e-3
"""Gradients were multiplied by a number if this much of them, relative to their norm, is not."""


class GradientWatch:
    """Compares the gradients of a model with what they were when it was last asked.

    ``sample``: the elements of each gradient that are kept for this. Of a sharded gradient, those
    are compared that are on this rank. ``names``: gets the ids of shards that replace parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: ElementSample[str],
        names: dict[int, str] | None = None,
    ) -> None:
        known = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in sample.sizes and sample.sizes[name] == parameter.numel()
        }
        self._sample = sample
        self._here = GradientsHere(model, known, sample, {} if names is None else names)
        self.is_replaced, self.sharded = self._here.is_replaced, self._here.sharded
        self.recorded = self._here.recorded
        self._states: dict[str, GradientVersion] = {}
        self._values: dict[str, Kept | None] = {}
        self._pending: set[str] = set()
        self.accept()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients that there are now, by parameter: of a sharded one, the part here."""
        found = ((name, self._here.here(name)) for name in self.parameters)
        return {name: one for name, one in found if one is not None}

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that are watched, or the shards that took their places."""
        return self._here.parameters

    @property
    def parts(self) -> dict[str, bytes]:
        """Of each gradient that is sharded: which of the sampled elements are on this rank."""
        return {name: packed(one) for name, one in self._here.parts.items()}

    def accept(self) -> None:
        """Take the gradients as they are now for what is known."""
        self._here.find_shards()
        for name in self.parameters:
            if name not in self._pending:
                self._accept(name)

    def accept_these(self, names: tuple[str, ...], pending: bool = False) -> None:
        """Take these gradients as they are now; if ``pending``, not until this is called again."""
        for name in names:
            if name not in self.parameters:
                continue
            if pending:
                self._pending.add(name)
            else:
                self._pending.discard(name)
                self._accept(name)

    def changes(self, by_value: bool) -> list[GradientChange]:
        """The changes since the last call, grouped by what was done.

        ``by_value``: compare all values. Otherwise only those gradients are compared whose version
        has changed, which costs much less, and misses what was done through ``.data`` or numpy.
        """
        self._here.find_shards()
        found: dict[tuple[float | None, bool], list[str]] = {}
        for name in self.parameters:
            if name in self._pending:
                continue
            state = self._here.state(name)
            if state == self._states[name] and not by_value:
                continue
            before, now = self._values[name], self._here.kept(name)
            self._states[name] = state
            self._values[name] = now
            if not _equal(before, now):
                found.setdefault(_done(before, now), []).append(name)
        return [
            GradientChange(tuple(names), factor, cleared)
            for (factor, cleared), names in found.items()
        ]

    def size(self, name: str) -> int:
        """How many elements of this gradient are kept."""
        return self._sample.size(name)

    def known_value(self, name: str) -> Kept | None:
        """The sampled elements of a gradient, as last accepted; empty if there was no gradient.

        None if they are not known, as while a collective may still change them, or if other ranks
        have them.
        """
        if name in self._pending or name not in self._values or self._here.is_elsewhere(name):
            return None
        value = self._values[name]
        if value is None and self._states[name] is None:
            return Kept(torch.empty(0, dtype=torch.float64))
        return value

    def value_before(self, name: str) -> Kept | None:
        """The sampled elements of a gradient, as last accepted."""
        return self._values.get(name)

    def value_now(self, name: str) -> Kept | None:
        """The sampled elements of a gradient as it is."""
        return self._here.kept(name) if name in self.parameters else None

    def state_now(self, name: str) -> GradientVersion:
        """Changes whenever something writes to a gradient, or puts another one in its place."""
        return self._here.state(name)

    def _accept(self, name: str) -> None:
        self._states[name] = self._here.state(name)
        self._values[name] = self._here.kept(name)


def _equal(before: Kept | None, now: Kept | None) -> bool:
    if before is None or now is None:
        return _is_nothing(before) and _is_nothing(now)
    if not before.same_places(now):
        return False
    was, is_now = before.values, now.values
    same = (was == is_now) | ((was != was) & (is_now != is_now))  # NaN counts as equal to NaN
    return bool(same.all())


def _is_nothing(value: Kept | None) -> bool:
    return value is None or not bool(value.values.any())


def _done(before: Kept | None, now: Kept | None) -> tuple[float | None, bool]:
    """By which number a gradient was multiplied, and whether it was cleared."""
    if _is_nothing(now):
        return None, True
    if before is None or now is None or _is_nothing(before) or not before.same_places(now):
        return None, False
    factor = factor_between(before.values, now.values)
    return factor and in_order(factor), False


def change_between(name: str, before: Kept | None, now: Kept | None) -> GradientChange | None:
    """The change from one value of a gradient to the next; None if they are the same."""
    if _equal(before, now):
        return None
    factor, cleared = _done(before, now)
    return GradientChange((name,), factor, cleared)


def factor_between(before: Tensor, now: Tensor, same: float = SAME_FACTOR) -> float | None:
    """The number that ``now`` is ``before`` times; None if it is no multiple of it.

    ``same``: how much of it, relative to its norm, may be something else.
    """
    square = float(before.flatten() @ before.flatten())
    if not square or not bool(torch.isfinite(now).all()):
        return None
    factor = float(now.flatten() @ before.flatten()) / square
    rest = float((now - factor * before).norm())
    return factor if rest <= same * float(now.norm()) else None


FEW = 4096
"""So many elements of large tensors are compared first."""

LOOSER = 100.0
"""So many times the tolerance is let through then: what rounds in other elements may not be among
the few by as much as in all. All elements decide afterwards."""


def _exact(values: Tensor) -> Tensor:
    return values.to("cpu", torch.float64)


def _may_fit(value: Tensor, segment: Tensor, same: float) -> bool:
    """False if a few elements show that the segment is no multiple of the value."""
    few = _exact(thinned(value, FEW))
    if len(few) == len(value) or not bool(few.any()):
        return True
    return factor_between(few, _exact(thinned(segment, FEW)), min(0.5, LOOSER * same)) is not None


def matching_segments(
    flat: Tensor, values: Mapping[str, Tensor], same: float = SAME_FACTOR
) -> Iterator[tuple[str, float]]:
    """The tensors that ``flat`` is put together from, one after the other, and their factors.

    Stops where no tensor fits. Shapes: all are flat. A tensor of one element is a multiple of every
    number, so its factor must be 1, or that of the tensor before. Of large ones no copy is made
    before a few of their elements have been found to fit.
    """
    at, left, last = 0, dict(values), 1.0
    while at < len(flat) and left:
        for name, value in left.items():
            segment = flat[at : at + len(value)]
            may_fit = len(segment) == len(value) and _may_fit(value, segment, same)
            factor = factor_between(_exact(value), _exact(segment), same) if may_fit else None
            if factor and (len(value) > 1 or abs(factor - last) <= same * abs(last)):
                yield name, in_order(factor)
                at, last = at + len(value), factor
                del left[name]
                break
        else:
            return


# Notices which lines of the user's hooks change gradients while a backward pass runs.

MOST_CHANGES = 2_000
"""Later changes are not recorded."""


@dataclass
class _RunningFunction:
    """A function of the user's that runs. ``line``: of it that runs. ``issued``: how many calls had
    been recorded before this line.
    """

    line: CodeLine | None = None
    issued: int = 0
    states: dict[str, GradientVersion] = field(default_factory=dict)
    values: dict[str, Kept | None] = field(default_factory=dict)


class HookWatch:
    """Only the parameters that a variable of the function holds are looked at, so that hooks on
    many parameters stay fast. ``calls``: those of the step, to which ``append`` adds one.
    """

    def __init__(
        self, gradients: GradientWatch, calls: Sequence[Call], append: Callable[..., None]
    ) -> None:
        self._gradients = gradients
        self._names = {id(one): name for name, one in gradients.parameters.items()}
        self._calls = calls
        self._append = append
        self._running: dict[int, _RunningFunction] = {}
        self._left = MOST_CHANGES
        self._racing: set[str] = set()
        """The gradients that a collective may change at any time."""

    def backward_ended(self) -> None:
        """No hook runs any longer."""
        self._running.clear()
        self._racing.clear()

    def on_event(self, frame: FrameType, event: str) -> None:
        """A function begins or returns inside a backward pass, or a line of it is to run."""
        if not self._left:
            return
        if event == "call":
            self._running[id(frame)] = _RunningFunction()
        running = self._running.get(id(frame))
        if running is None:
            return
        if running.line is not None:
            self._line_has_run(frame, running)
        if event == "return":
            del self._running[id(frame)]
            return
        for name in self._names_in(frame):
            if name not in running.states:
                self._look_at(running, name)
        running.line = line_at(frame) if event == "line" else None
        running.issued = len(self._calls)

    def _names_in(self, frame: FrameType) -> list[str]:
        """The parameters that a function holds, and those of whose gradients it was given one."""
        parameters = self._gradients.parameters
        known = {name for one in self._running.values() for name in one.states}
        gradients = {id(parameters[name].grad): name for name in known}
        found = []
        for value in frame.f_locals.values():
            names = self._names if isinstance(value, nn.Parameter) else gradients
            name = names.get(id(value)) if isinstance(value, Tensor) else None
            if name is not None and name not in self._racing:
                found.append(name)
        return found

    def _line_has_run(self, frame: FrameType, running: _RunningFunction) -> None:
        line = running.line
        hidden = line is not None and may_hide(line.file, line.number)
        for name, before in list(running.states.items()):
            reduced = self._reduced(name, running.issued)
            if reduced:  # it may have changed the values without a new version
                if any(one.asynchronous for one in reduced):
                    self._racing.add(name)
                    del running.states[name]
                else:
                    self._look_at(running, name)
                continue
            if self._gradients.state_now(name) == before and not hidden:
                continue
            old = running.values[name]
            self._look_at(running, name)
            change = change_between(name, old, running.values[name])
            if change is None:
                continue
            for other in self._running.values():
                if other is not running and name in other.states:
                    self._look_at(other, name)
            self._left -= 1
            self._append(Kind.CHANGE, (line, line), change=change, callers=callers_of(frame))

    def _look_at(self, running: _RunningFunction, name: str) -> None:
        running.states[name] = self._gradients.state_now(name)
        running.values[name] = self._gradients.value_now(name)

    def _reduced(self, name: str, since: int) -> list[CollectiveCall]:
        """The collectives that have been issued for a gradient since then."""
        return [
            call.collective
            for call in self._calls[since:]
            if call.collective is not None and name in call.collective.names
        ]


# Notices the lines of a step that change the weights, or whether these require a gradient.

MOST_WEIGHTS = 20_000_000
"""The weights of a larger model are not compared."""

DIGITS = 16
"""Digests are cut to so many digits."""

SHARDED = "sharded"
"""Takes the place of a digest for a weight of which a rank has only a part."""


class WeightWatch:
    """Compares the weights of a model, and what requires a gradient, with what they were.

    ``parameters``: those that get a gradient. ``others``: those that get none, such as a teacher's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self._parameters = parameters
        self._flags = self._flags_now()
        elements = sum(one.numel() for one in parameters.values())
        self._compares = elements <= MOST_WEIGHTS
        self._compared: dict[str, nn.Parameter] = {}
        if self._compares:  # of a large model only the shards stay that take their places
            room = MOST_WEIGHTS - elements
            self._compared = {**parameters, **_comparable(others or {}, room)}
        self._versions = self._versions_now()
        self._digests = self._digests_now() if self._compares else {}
        self._first = self._digests

    def switched(self) -> dict[bool, tuple[str, ...]]:
        """Whether a gradient is required now -> the parameters for which this is new."""
        now = self._flags_now()
        if now == self._flags:
            return {}
        before, self._flags = self._flags, now
        changed = [
            (name, flag)
            for name, flag, old in zip(self._parameters, now, before, strict=True)
            if flag != old
        ]
        return {
            flag: tuple(name for name, its in changed if its is flag)
            for flag in dict.fromkeys(flag for _, flag in changed)
        }

    def changed(self, by_value: bool) -> tuple[tuple[str, ...], str]:
        """The parameters that have changed since the last call, and a digest of all weights; "" if
        they are again what they were at first.

        ``by_value``: compare all values, and not only those whose version has changed.
        """
        if not self._compares:
            return (), ""
        versions = self._versions_now()
        if versions == self._versions and not by_value:
            return (), ""
        before = self._digests
        self._versions, self._digests = versions, self._digests_now()
        names = tuple(
            name
            for name, one in self._digests.items()
            if one != before[name] and SHARDED not in (one, before[name])
        )
        return names, "" if self._digests == self._first else digest_of(self._digests)

    def _flags_now(self) -> list[bool]:
        return [one.requires_grad for one in self._parameters.values()]

    def _versions_now(self) -> list[int]:
        return [one._version for one in self._compared.values()]

    def _digests_now(self) -> dict[str, str]:
        return {name: _digest(name, one) for name, one in self._compared.items()}


def _digest(name: str, weight: nn.Parameter) -> str:
    try:
        return digest({name: plain(weight)})
    except NotPlain:
        return SHARDED


def _comparable(others: Mapping[str, nn.Parameter], most: int) -> Mapping[str, nn.Parameter]:
    """The parameters without a gradient; {} if there are too many, or some hold no values."""
    try:
        if sum(one.numel() for one in others.values()) > most:
            return {}
        for name, one in others.items():
            digest({name: plain(one)})
    except Exception:  # it is on no device, or has no shape yet
        return {}
    return others


def digest_of(digests: Mapping[str, str]) -> str:
    """One digest of several."""
    return sha256("".join(digests.values()).encode()).hexdigest()[:DIGITS]


# Watches the buffers of a model: what they hold at a forward pass, and which lines change them.
#
# Running statistics and moving averages are buffers. No gradient reaches them, so each rank
# changes its own, unless the step reduces them.

MOST_BUFFER_ELEMENTS = 200_000
"""The values of larger buffers are not kept."""

MOST_WATCHED = 64
"""Of a model with more buffers, the lines that change them are not looked for."""

LARGEST = 1_000_000
"""Larger buffers are not compared between the ranks: they are tables that no step changes."""


BufferState = tuple[tuple[str, int, int], ...]


class BufferWatch:
    """Remembers what the buffers of ``model`` were when it was last asked."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners = [(name, module) for name, module in model.named_modules() if module._buffers]
        self._watches = sum(len(module._buffers) for _, module in self._owners) <= MOST_WATCHED
        self._state = self._now()
        self._digest = ""
        self._values: Mapping[str, Tensor] = {}

    def changed(self) -> tuple[str, ...]:
        """The buffers that have another version, or were replaced, since the last call."""
        if not self._owners or not self._watches:
            return ()
        now = self._now()
        if now == self._state:
            return ()
        before, self._state = set(self._state), now
        return tuple(entry[0] for entry in now if entry not in before)

    def values(self) -> Mapping[str, Tensor]:
        """Copies of what the buffers hold, the same ones as before if nothing has changed."""
        buffers = dict(self._model.named_buffers())
        if not buffers or sum(one.numel() for one in buffers.values()) > MOST_BUFFER_ELEMENTS:
            return {}
        try:
            now = digest({name: plain(one) for name, one in buffers.items()})
            if now != self._digest:
                self._values = {
                    name: plain(one).detach().cpu().clone() for name, one in buffers.items()
                }
                self._digest = now
        except Exception:  # a compiler or a transform of torch.func holds them
            return {}
        return self._values

    def _now(self) -> BufferState:
        return tuple(
            (f"{name}.{key}" if name else key, id(one), one._version)
            for name, module in self._owners
            for key, one in module._buffers.items()
            if one is not None
        )


def digests_of_buffers(model: nn.Module) -> dict[str, str]:
    """Buffer -> a digest of what it holds; without large ones, and those that hold no values."""
    found = {}
    for name, one in model.named_buffers():
        if one.numel() <= LARGEST:
            try:
                with torch.no_grad():
                    found[name] = digest({name: plain(one)})[:DIGITS]
            except Exception:  # it is on no device, or sharded
                continue
    return found


# Keeps what the gradients held after each call that may have changed them.

MOST_OF_A_STATE = 100_000
"""About so many elements are kept of all gradients together after one call."""

FEWEST, MOST = 4, 256
"""So many elements are kept of one gradient."""

MOST_IN_ALL = 2_000_000
"""About so many elements are kept of all states of a rank, which is 16 MB."""


class StateLog:
    """``gradients``: knows the values of the gradients as they were last accepted."""

    def __init__(self, gradients: GradientWatch) -> None:
        self._gradients = gradients
        self._left = MOST_IN_ALL
        self.states: list[GradientState] = []
        self.complete = True
        count = max(1, len(gradients.parameters))
        self.each = max(FEWEST, min(MOST, MOST_OF_A_STATE // count))

    def note(self, call: int, names: Sequence[str]) -> None:
        """Keep what these gradients hold now. ``call``: the number of the call that was made."""
        if self._left <= 0:
            self.complete = False
            return
        values, numbers = dict[str, bytes](), dict[str, bytes]()
        for name in names:
            value = self._gradients.known_value(name)
            if value is None:
                continue
            kept = thinned_part(value, self._gradients.size(name), self.each)
            if kept.numbers is not None and not len(kept.numbers):
                continue  # a rank may have no part of a small gradient
            values[name] = packed(kept.values) if len(kept.values) else b""
            if kept.numbers is not None:
                numbers[name] = packed(kept.numbers)
            self._left -= len(kept.values)
        self.states.append(GradientState(call, values, numbers))
