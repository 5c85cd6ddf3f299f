"""Computes a big batch in micro-batches where its forward pass does not fit into memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import BatchDims, count_examples, take
from ddp_equivalence.case.build import copied_state, put_state
from ddp_equivalence.case.memory import give_back_memory
from ddp_equivalence.case.random_state import seeded

# The gradient of a mean over examples is the mean of the gradients of micro-batches, weighted by
# their numbers of examples, and that of a sum is their sum. No loss says which it is, or whether it
# is either: it may divide by a count of tokens, or compare examples with each other. So two
# examples are computed together and one by one, and the loss of the micro-batches is compared with
# that of the whole batch, which needs little memory without a backward pass, for these weights and
# for two others.

ASKED_EVERY = 0.05
"""Seconds from one look at the memory to the next."""

KEPT_FREE = 0.1
"""So much of the machine's memory stays free for others, beside the room for the gradients."""

SAME = 1e-9
"""Two gradients, or two losses, are the same up to so much of their norm, in float64."""

MOST_COMPARED = 1_000_000
"""Of larger gradients so many elements are compared, at equal distances."""

BESIDE = 2
"""With so many other sets of weights the micro-batches must have the loss of the whole batch."""

MOST_MOVED = 10_000
"""About so many elements of each weight are moved for this."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, tuple, set, dict)
"""Attributes of modules of these types are put back, such as the number of calls so far."""

OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What every module holds."""


class DoesNotFit(BaseException):
    """Ends a forward pass. No ``except Exception`` of the user's stops it on its way."""


class Pass(NamedTuple):
    """A forward and backward pass over a batch. ``seed``: of all that it draws."""

    model: nn.Module
    seed: int
    forward: Callable[[Any], Tensor]
    backward: Callable[[Tensor], None]


class MicroBatches:
    """``count``: in how many micro-batches a big batch is computed. It becomes larger when the
    forward pass does not fit into memory, if micro-batches are seen to add up to the whole.

    ``dims``: where a batch holds its examples.
    """

    def __init__(self, dims: BatchDims = None) -> None:
        self.count = 1
        self._dims = dims
        self._adds_up = False
        self._is_settled = False

    @classmethod
    def of(cls, batches: int, dims: BatchDims) -> MicroBatches:
        """Several batches are computed as a whole: the later ones are not seen to add up."""
        return cls(dims) if batches == 1 else cls.whole()

    @classmethod
    def whole(cls) -> MicroBatches:
        """Every batch is computed as a whole, whether it fits into memory or not."""
        found = cls()
        found._is_settled = True
        return found

    def run(self, one: Pass, batch: Any) -> float:
        """Run forward and backward for the batch, and return its loss. The first time, find out in
        how many micro-batches.
        """
        if not self._is_settled:
            loss = self._first(one, batch)
            self._is_settled = True
            if loss is not None:
                return loss
            self.count = 1
        return self._run(one, batch)

    def _first(self, one: Pass, batch: Any) -> float | None:
        """The loss, once the batch fits into memory; None if it must be computed as a whole."""
        if callable(self._dims):  # nobody else can see into the batch
            return None
        state, examples = State(one.model), count_examples(batch, self._dims)
        while True:
            try:
                with _watched(one.model) if self.count < examples else nullcontext():
                    loss = self._run(one, batch)
            except DoesNotFit:
                state.put_back()
                if self.count == 1 and not self._may_split(one, batch, state):
                    return None
                self.count = min(2 * self.count, examples)
                continue
            if self.count == 1 or self._add_up_to_whole(loss, one, batch, state):
                return loss
            state.put_back()
            return None

    def _run(self, one: Pass, batch: Any) -> float:
        if self.count == 1:
            with seeded(one.seed):
                value = one.forward(batch)
                loss = value.item()
                one.backward(value)
            return loss
        loss, examples = 0.0, count_examples(batch, self._dims)
        for number in range(self.count):
            begin, end = (place * examples // self.count for place in (number, number + 1))
            positions = range(begin, end)
            with seeded(one.seed):
                value = one.forward(take(batch, positions, self._dims))
                value = value if self._adds_up else len(positions) / examples * value
                loss += value.item()
                one.backward(value)
        return loss

    def _may_split(self, one: Pass, batch: Any, state: State) -> bool:
        """True if the gradient of two examples is the mean, or the sum, of that of each."""
        if count_examples(batch, self._dims) < 2:
            return False
        two = take(batch, (0, 1), self._dims)
        try:
            together = self._gradients(one, two)
            self.count = 2
            for self._adds_up in (False, True):
                if _is_same(self._gradients(one, two), together):
                    return state.is_unchanged
            return False
        except Exception:  # one example may be too few for the loss
            return False
        finally:
            self.count = 1
            state.put_back()

    def _gradients(self, one: Pass, batch: Any) -> Tensor:
        """Sampled elements of the gradients of a batch, shape (elements,)."""
        one.model.zero_grad(set_to_none=True)
        self._run(one, batch)
        found = [each.grad for each in one.model.parameters() if each.grad is not None]
        distance = 1 + sum(each.numel() for each in found) // MOST_COMPARED
        return torch.cat([each.to_dense().reshape(-1)[::distance].clone() for each in found])

    def _add_up_to_whole(self, loss: float, one: Pass, batch: Any, state: State) -> bool:
        """True if the whole batch has this loss of the micro-batches, also with weights a little
        beside these, and the model still holds what it held. For one set of weights the loss may be
        the same although the examples count differently.
        """
        with suppress(Exception), torch.no_grad():
            if not _is_near(loss, self._loss(one, batch, 1)):
                return False
            for seed in range(BESIDE):
                with _moved(one.model, seed):
                    found, whole = (self._loss(one, batch, count) for count in (self.count, 1))
                if not _is_near(found, whole):
                    return False
            return state.is_unchanged
        return False

    def _loss(self, one: Pass, batch: Any, count: int) -> float:
        """The loss of a batch in so many micro-batches, without a backward pass."""
        others = MicroBatches(self._dims)
        others.count, others._adds_up = count, self._adds_up
        return others._run(one._replace(backward=lambda value: None), batch)


class State:
    """What a model holds beside its weights: tensors, and plain attributes of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors, self._attributes = copied_state(model), _attributes(model)

    @property
    def is_unchanged(self) -> bool:
        """True if the model holds the same as at first."""
        now, before = copied_state(self._model), self._tensors
        return (
            _attributes(self._model) == self._attributes
            and now.keys() == before.keys()
            and all(torch.equal(now[name], before[name]) for name in now)
        )

    def put_back(self) -> None:
        """Let go of the gradients, and give the model what it held at first."""
        self._model.zero_grad(set_to_none=True)
        put_state(self._model, self._tensors)
        modules = dict(self._model.named_modules())
        for path, values in self._attributes.items():
            modules[path].__dict__.update(copy.deepcopy(values))
        give_back_memory()


def _attributes(model: nn.Module) -> dict[str, dict[str, object]]:
    return {
        path: {
            name: copy.deepcopy(one)
            for name, one in vars(module).items()
            if name not in OF_TORCH
            if type(one) in PLAIN or (type(one) in CONTAINERS and _is_plain(one))
        }
        for path, module in model.named_modules()
    }


def _is_plain(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return all(type(one) in PLAIN for one in items)


@contextmanager
def _moved(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside the block some elements of each weight are a little beside what they are."""
    generator, before = torch.Generator().manual_seed(seed), list[tuple[Tensor, Tensor]]()
    try:
        for weight in model.parameters():
            flat = weight.detach().view(-1)[:: 1 + weight.numel() // MOST_MOVED]
            before.append((flat, flat.clone()))
            flat += 0.1 * torch.randn(flat.shape, generator=generator, dtype=flat.dtype)
        yield
    finally:
        for flat, values in before:
            flat.copy_(values)


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Raises DoesNotFit at a call of a module, if the block is about to take the memory that the
    gradients of the model need: it may take twice as much until the next call as it ever did.
    """
    gradients = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    machine = psutil.virtual_memory()
    least, before = gradients + KEPT_FREE * machine.total, machine.available
    asked, last, most = time.monotonic(), before, 0

    def look() -> None:
        nonlocal asked, last, most
        now = time.monotonic()
        if now - asked < ASKED_EVERY or not torch.is_grad_enabled():
            return
        asked = now
        available = psutil.virtual_memory().available
        last, most = available, max(most, last - available)
        if available - 2 * most < least and before - available > KEPT_FREE * machine.total:
            raise DoesNotFit

    call = nn.Module.__call__

    def looking(module: nn.Module, /, *arguments: Any, **named: Any) -> Any:
        if not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None):
            look()
        return call(module, *arguments, **named)

    # With a hook for all modules torch.compile warns, and compiles models in another way.
    with patch.object(nn.Module, "__call__", looking):
        yield


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return float((one - other).norm()) <= SAME * float(other.norm())


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * abs(other)
