"""DistributedDataParallel: the devices that it is given are used, and the CPU is meant."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from pretended_gpus import runtime, settings


def install() -> None:
    """Replace the devices in the arguments of DDP's constructor."""
    if settings.strict():
        return
    wrapper: Any = DistributedDataParallel
    make = wrapper.__init__

    @wraps(make)
    def made(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *arguments: Any,
        **keywords: Any,
    ) -> None:
        for device in device_ids or ():
            runtime.use(runtime.index_of(device))
        make(self, module, None, None, *arguments, **keywords)

    wrapper.__init__ = made
