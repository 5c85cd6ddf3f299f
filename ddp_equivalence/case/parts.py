"""Computes a big batch in parts where what its forward pass keeps does not fit into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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

# The gradient of a mean over examples is the mean of the gradients of parts, weighted by their
# numbers of examples, and that of a sum is their sum. No loss says which it is, or whether it is
# either: it may divide by a count of tokens, or compare examples with each other. So two examples
# are computed together and one by one, and the loss of the parts is compared with that of the whole
# batch, which needs little memory without a backward pass.

ASKED_EVERY = 0.05
"""Seconds from one look at the memory to the next."""

KEPT_FREE = 0.1
"""So much of the machine's memory stays free for others, beside the room for the gradients."""

SAME = 1e-9
"""Two gradients, or two losses, are the same up to so much of their norm, in float64."""

MOST_COMPARED = 1_000_000
"""Of larger gradients so many elements are compared, at equal distances."""


class DoesNotFit(BaseException):
    """Ends a forward pass. No ``except Exception`` of the user's stops it on its way."""


class Pass(NamedTuple):
    """A forward and backward pass over a batch. ``seed``: of all that it draws."""

    model: nn.Module
    seed: int
    forward: Callable[[Any], Tensor]
    backward: Callable[[Tensor], None]


class Parts:
    """``count``: in how many parts big batches are computed. It becomes larger when the forward
    pass of the first one does not fit into memory, if parts are seen to add up to the whole.

    ``dims``: where a batch holds its examples.
    """

    def __init__(self, dims: BatchDims = None) -> None:
        self.count = 1
        self._dims = dims
        self._adds_up = False
        self._is_settled = False

    @classmethod
    def whole(cls) -> Parts:
        """Every batch is computed as a whole, whether it fits into memory or not."""
        parts = cls()
        parts._is_settled = True
        return parts

    def run(self, one: Pass, batch: Any) -> float:
        """Run forward and backward for the batch, and return its loss. For the first batch, find
        out in how many parts.
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
        try:
            examples = count_examples(batch, self._dims)
        except ValueError:  # a function deals a batch into which nobody else can see
            return None
        state = copied_state(one.model)
        while True:
            try:
                with _watched(one.model) if self.count < examples else nullcontext():
                    loss = self._run(one, batch)
            except DoesNotFit:
                _forget(one.model, state)
                if self.count == 1 and not self._may_split(one, batch, state):
                    return None
                self.count = min(2 * self.count, examples)
                continue
            if self.count == 1 or self._is_whole(loss, one, batch, state):
                return loss
            _forget(one.model, state)
            return None

    def _run(self, one: Pass, batch: Any) -> float:
        if self.count == 1:
            with seeded(one.seed):
                value = one.forward(batch)
                loss = value.item()
                one.backward(value)
            return loss
        loss, examples = 0.0, count_examples(batch, self._dims)
        count = min(self.count, examples)
        for part in range(count):
            positions = range(part * examples // count, (part + 1) * examples // count)
            with seeded(one.seed):
                value = one.forward(take(batch, positions, self._dims))
                value = value if self._adds_up else len(positions) / examples * value
                loss += value.item()
                one.backward(value)
        return loss

    def _may_split(self, one: Pass, batch: Any, state: Mapping[str, Tensor]) -> bool:
        """True if the gradient of two examples is the mean, or the sum, of that of each."""
        if count_examples(batch, self._dims) < 2:
            return False
        two = take(batch, (0, 1), self._dims)
        try:
            together = self._gradients(one, two)
            self.count = 2
            for self._adds_up in (False, True):
                if _is_same(self._gradients(one, two), together):
                    return _is_state(one.model, state)
            return False
        except Exception:  # one example may be too few for the loss
            return False
        finally:
            self.count = 1
            _forget(one.model, state)

    def _gradients(self, one: Pass, batch: Any) -> Tensor:
        """Sampled elements of the gradients of a batch, shape (elements,)."""
        one.model.zero_grad(set_to_none=True)
        self._run(one, batch)
        found = [each.grad for each in one.model.parameters() if each.grad is not None]
        distance = 1 + sum(each.numel() for each in found) // MOST_COMPARED
        return torch.cat([each.to_dense().reshape(-1)[::distance].clone() for each in found])

    def _is_whole(self, loss: float, one: Pass, batch: Any, state: Mapping[str, Tensor]) -> bool:
        """True if the whole batch has this loss, and the model the state from before."""
        with suppress(Exception), torch.no_grad(), seeded(one.seed):
            whole = one.forward(batch).detach()
            return _is_same(whole.new_tensor(loss), whole) and _is_state(one.model, state)
        return False


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


def _forget(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    put_state(model, state)
    give_back_memory()


def _is_state(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    now = copied_state(model)
    return now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in now)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return float((one - other).norm()) <= SAME * float(other.norm())
