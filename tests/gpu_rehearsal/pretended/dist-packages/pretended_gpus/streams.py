"""Streams and events: everything is computed at once, so there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pretended_gpus import runtime


class Stream:
    """A stream of a device; work given to it is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", runtime.index_of(device))
        self.device_index, self.cuda_stream, self.stream_id = self.device.index, 0, 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return Event() if event is None else event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class Event:
    """An event, which has always happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return None

    def record(self, stream: Any = None) -> None:
        return None

    def wait(self, stream: Any = None) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: Any) -> float:
        return 0.0


@contextmanager
def _using(stream: Any) -> Iterator[Any]:
    yield stream


def install() -> None:
    """Replace the streams and events of torch.cuda and torch.accelerator."""
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream = _using
    # torch's compiler wants each of these to be a function of its own
    cuda.current_stream = lambda device=None: Stream(device)
    cuda.default_stream = lambda device=None: Stream(device)
    cuda.set_stream = lambda stream: None
    accelerator: Any = torch.accelerator
    accelerator.current_stream = lambda device=None: Stream(device)
    accelerator.set_stream = lambda stream: None
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
