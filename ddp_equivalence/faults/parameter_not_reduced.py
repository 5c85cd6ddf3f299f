"""DDP ignores one parameter, so that its gradient is not reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fault, RecordFiring


@contextmanager
def ignore_first_parameter(record_firing: RecordFiring) -> Iterator[None]:
    """Every DDP with several parameters ignores the first one."""
    initialise = DistributedDataParallel.__init__

    def ignore_and_initialise(ddp: Any, module: nn.Module, *given: Any, **named: Any) -> None:
        first, *others = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if others:
            # A shared parameter has several names, and is ignored under all of them.
            named_parameters = module.named_parameters(remove_duplicate=False)
            names = [name for name, parameter in named_parameters if parameter is first]
            ddp._set_params_and_buffers_to_ignore_for_model(module, names)
            record_firing()
        initialise(ddp, module, *given, **named)

    with patch.object(DistributedDataParallel, "__init__", ignore_and_initialise):
        yield


FAULT = Fault(
    name="parameter_not_reduced",
    sentence="DistributedDataParallel is told to ignore the first parameter.",
    break_torch=ignore_first_parameter,
    acts_at=("wrap",),
)
