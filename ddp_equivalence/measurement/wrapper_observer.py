"""Watches one DistributedDataParallel wrapper around a model that is observed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.measurement.call_watch import CallWatch
from ddp_equivalence.measurement.module_calls import Heard, listen, stop_listening
from ddp_equivalence.measurement.observation import Wrapper

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
