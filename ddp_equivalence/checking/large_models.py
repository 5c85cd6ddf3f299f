"""Decides by the size of a model who compares the gradients, and when the big batch is computed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import nn

from ddp_equivalence.case import settings
from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.gradients import ElementSample, digest
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.comparison.shared import SharedGradients, shared_gradients
from ddp_equivalence.diagnosis.view import expected_of
from ddp_equivalence.measurement.measure import message_for
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.deadlines import threads_beside

COMPARED_BY_RANKS = 2_000_000
"""From so many parameters on each rank compares its own gradients, instead of sending them. With
fewer, a check takes little time either way."""

BIG_BATCH_BYTES = 2 * torch.float64.itemsize
"""What the big batch takes for each parameter: its weight and its gradient, in float64."""

RANK_COPIES = 3
"""What a rank takes: its weights, their gradients, and the buckets in which DDP reduces these."""

MOST_OF_MEMORY = 0.9


class BigBatch:
    """The big batch of a request, and how its gradients reach the ranks.

    ``message``: the request as it is sent to the ranks. It is made before the model is built here,
    for a builder that hands out one instance would put what was done to it into the message.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._model: nn.Module | None = None
        self._before: Expected | None = None
        self._shared: SharedGradients | None = None
        self.message = b""

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside the block ranks can read the gradients, once they are told. If the big batch and
        the ranks need more memory together than this machine has, the big batch comes first.

        Raises BadCase if the step cannot be sent, or if the model cannot be built.
        """
        with shared_gradients(self._may_be_large()) as shared:
            address = "" if shared is None else shared.address
            self.message = message_for(self._request, truth=address, compared_from=_compared_from())
            if not self._request.case.is_catalogue:
                self._model = build_model(self._request.case)
            if shared is not None and self._is_large():
                self._shared = shared
                if self._takes_turns():
                    self._before = self._computed()
            yield

    def expected(self) -> Expected:
        """The big batch, computed while the ranks work, unless it came first.

        Raises BadCase whenever the case's model, batch or loss is at fault.
        """
        if self._before is not None:
            return self._before
        with threads_beside(self._request.processes.world_size):
            return self._computed()

    def tell_ranks(self, expected: Expected, sample: ElementSample[GradientKey]) -> None:
        """Let the ranks read the gradients, if they are to compare theirs."""
        if self._shared is not None:
            reference, exact = expected.reference, torch.float64
            dtype = exact if exact in reference.dtypes.values() else reference.lowest_dtype
            self._shared.put(reference.expected, sample, dtype)

    def _computed(self) -> Expected:
        model, self._model = self._model, None  # which frees its memory, once it is not needed
        start = "" if self._shared is None or model is None else digest(model.named_parameters())
        expected = expected_of(self._request, model)
        expected.start = start
        return expected

    def _may_be_large(self) -> bool:
        if self._request.in_process:  # rank 0 would wait for itself
            return False
        return not self._request.case.is_catalogue or _compared_from() == 0

    def _is_large(self) -> bool:
        return self._elements >= _compared_from()

    @property
    def _elements(self) -> int:
        return 0 if self._model is None else sum(one.numel() for one in self._model.parameters())

    def _takes_turns(self) -> bool:
        if self._model is None:
            return False
        held = sum(one.nbytes for one in self._model.parameters())
        of_ranks = held * RANK_COPIES * self._request.processes.world_size
        room = MOST_OF_MEMORY * int(psutil.virtual_memory().available)
        return BIG_BATCH_BYTES * self._elements + of_ranks > room


def _compared_from() -> int:
    """From so many parameters on the ranks compare; models of the catalogue are smaller."""
    wanted = settings.current().compared_by_ranks
    return COMPARED_BY_RANKS if wanted is None else 0 if wanted else sys.maxsize
