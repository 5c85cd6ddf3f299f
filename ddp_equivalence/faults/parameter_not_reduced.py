"""DDP is told to ignore one parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fault, Fire


@contextmanager
def one_ignored(fire: Fire) -> Iterator[None]:
    """The first of several parameters is ignored."""
    initialise = DistributedDataParallel.__init__

    def making(ddp: Any, module: nn.Module, *given: Any, **named: Any) -> None:
        first, *others = [one for one in module.parameters() if one.requires_grad]
        if others:
            # A shared one under all its names.
            every = module.named_parameters(remove_duplicate=False)
            names = [name for name, one in every if one is first]
            ddp._set_params_and_buffers_to_ignore_for_model(module, names)
            fire()
        initialise(ddp, module, *given, **named)

    with patch.object(DistributedDataParallel, "__init__", making):
        yield


FAULT = Fault(
    name="parameter_not_reduced",
    sentence="DistributedDataParallel is told to ignore the first parameter.",
    in_torch=one_ignored,
)
