"""The batches that a rank's loaders have yielded, until a model has been trained with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.observed_scripts.in_script.generator_states import generator_state
from ddp_equivalence.observed_scripts.rows import Rows

MOST_AHEAD = 64
"""So many batches of a loader are kept before the model was trained with one of them."""


@dataclass
class Fetched:
    """A batch of a loader. ``digests``: of its tensors. ``generator``: the state of torch's
    generators when the script got the batch; None if it has not got it yet.
    """

    rows: Rows
    digests: frozenset[str]
    generator: Tensor | None = None


class FetchedBatches:
    """``training``: the loaders that are trained with. ``of_step``: the (loader, number) of each
    batch of the step in progress, in order. A loader has the number that its process gave it.
    """

    def __init__(self) -> None:
        self.training: set[int] = set()
        self.of_step: list[tuple[int, int]] = []
        self._batches: dict[int, list[Fetched | None]] = {}
        self._given: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._since_call: list[int] = []
        self._evaluated: dict[int, int] = {}
        self._in_order_of_training: list[int] = []
        self._matched = False
        self._passes: dict[tuple[int, int], int] = {}

    # --- what happens

    def reads_on(self, loader: int) -> None:
        """The loader is asked for another batch: what was only evaluated is forgotten."""
        if loader in self._evaluated:
            self._batches[loader][self._evaluated.pop(loader)] = None

    def add(self, loader: int, rows: Rows) -> None:
        """Keep a batch until the model has been trained with it, or many others have come."""
        digests = frozenset(digest(tensor) for _, tensor in rows.all_tensors() if tensor.ndim)
        batches = self._batches.setdefault(loader, [])
        batches.append(Fetched(rows, digests))
        if len(batches) > MOST_AHEAD and loader not in self.training:
            batches[-1 - MOST_AHEAD] = None  # such as one of an evaluation

    def give(self, loader: int) -> None:
        """The script gets the first batch of a loader that it has not got yet."""
        number = self._given.get(loader, 0)
        if number == len(self._batches[loader]):
            return  # the one around it gives a batch more than once
        self._given[loader] = number + 1
        if (batch := self._batches[loader][number]) is not None:
            batch.generator = generator_state()
        self._since_call.append(loader)

    def trained_with(self, arguments: Any, passes: int) -> None:
        """A module is trained with these arguments: note which batches they are of. ``passes``: how
        many backward passes the step has made before.
        """
        since, self._since_call = set(self._since_call), []
        matched = self._matching(arguments)
        for loader, number in matched.items():
            self._use(loader, number + 1)
            self._passes[loader, number] = passes
            self._evaluated.pop(loader, None)  # such as by a teacher
            self._matched = True
        if not matched and not since:  # this is made of them, such as by a frozen encoder
            since, self._evaluated = set(self._evaluated), {}
        self.training |= set(matched) or since

    def evaluated_with(self, arguments: Any) -> None:
        """A module is called without being trained: its batch does not make a training loader."""
        if self._batches:
            self._evaluated |= self._matching(arguments)
            self._since_call = [one for one in self._since_call if one not in self._evaluated]

    def step_begins(self) -> None:
        """The last step has been written."""
        for loader, number in self.of_step:
            self._batches[loader][number] = None
        self.step_was_skipped()
        self._matched = False

    def step_was_skipped(self) -> None:
        """Forget which batches the step in progress has used."""
        self.of_step = []

    # --- what is asked

    def step_ends(self) -> None:
        """Where no batch was recognised in a call, the step used all that the script has got."""
        if not self._matched:
            for loader in self.training:
                self._use(loader, self._given.get(loader, 0))

    @property
    def used(self) -> tuple[tuple[int, int], ...]:
        """As ``of_step``, with the loaders numbered in the order of ``loaders``."""
        numbers = {loader: number for number, loader in enumerate(self._in_order_of_training)}
        return tuple((numbers[loader], number) for loader, number in self.of_step)

    def left_out(self, passes: int) -> tuple[int, ...]:
        """Which batches of the first loader have no backward pass, of so many: not the last ones
        with which a module was called before each.
        """
        of_first = [one for one in self.of_step if one[0] == self.of_step[0][0]]
        used = {self._passes[one]: one for one in of_first if one in self._passes}.values()
        is_known = len(used) == passes < len(of_first)
        return tuple(n for n, one in enumerate(of_first) if one not in used) if is_known else ()

    @property
    def loaders(self) -> tuple[int, ...]:
        """Those that were trained with, in the order in which they first were."""
        return tuple(self._in_order_of_training)

    def batches_of_step(self) -> Sequence[Fetched]:
        """The batches of the step in progress."""
        found = [self._batches[loader][number] for loader, number in self.of_step]
        return [one for one in found if one is not None]

    @property
    def ahead(self) -> int:
        """How many batches were fetched and not used."""
        return sum(len(self._batches[one]) - self._used.get(one, 0) for one in self.training)

    # --- matching

    def _matching(self, arguments: Any) -> dict[int, int]:
        """The first unused batch of each loader that has a tensor among these arguments.

        Two loaders may yield the same rows, as where a script also evaluates on its training data:
        the one is meant that was used before, or else that was read first.
        """
        given = {digest(one) for one in tensors_of(arguments) if one.ndim}
        found: dict[int, int] = {}
        for loader in sorted(self._batches, key=lambda one: (one not in self._used, one)):
            batches = self._batches[loader]
            for number in range(self._used.get(loader, 0), len(batches)):
                batch = batches[number]
                if batch is not None and given.intersection(batch.digests):
                    given -= batch.digests
                    found[loader] = number
                    break
        return found

    def _use(self, loader: int, until: int) -> None:
        for number in range(self._used.get(loader, 0), until):
            if self._batches[loader][number] is not None:
                self.of_step.append((loader, number))
                if loader not in self._in_order_of_training:
                    self._in_order_of_training.append(loader)
        self._used[loader] = max(until, self._used.get(loader, 0))


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's values, whatever its shape."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return ""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    found = hashlib.sha256(str(flat.dtype).encode())  # most processors have instructions for it
    found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]
