"""Notices an ``nn.DataParallel`` that a step makes and that has no device to run on.

Without CUDA devices it has no device ids. It then calls the module itself, without an error and
without anything that is parallel, so that its result is right whatever the step does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn


class IdleDataParallel:
    """``called``: a wrapper without devices, which is no part of ``model`` as it was built, was
    called inside ``watched``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._built = {id(one) for one in model.modules() if isinstance(one, nn.DataParallel)}
        self.called = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The block runs a step."""
        forward = nn.DataParallel.forward

        def watching(wrapper: Any, *inputs: Any, **named: Any) -> Any:
            if not wrapper.device_ids and id(wrapper) not in self._built:
                self.called = True
            return forward(wrapper, *inputs, **named)

        with patch.object(nn.DataParallel, "forward", watching):
            yield
