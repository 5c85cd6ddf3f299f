"""Records the operations of the loss of the case, of the big batch and of parts of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.observation import Indices
from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.measurement.operations import Operations
from ddp_equivalence.reference import in_dtype, loss_of_the_case, train


def operations_of_the_loss(
    setting: Setting, parts: Sequence[Indices], time: TimeLeft
) -> list[Operations] | None:
    """What the loss of the case computes of each of these parts of the big batch, in float64.

    The last of several steps is recorded. None if a loss cannot be computed or is too long.
    """
    found = []
    for part in parts:
        with time.gradient(len(part)):
            operations = _operations(setting, part)
        if operations is None or not operations.complete:
            return None
        found.append(operations)
    return found


def _operations(setting: Setting, part: Indices) -> Operations | None:
    loss = loss_of_the_case(setting.case)
    batches = [
        in_dtype(one, torch.float64)
        for one in (*setting.earlier_batches, take(setting.batch, part, setting.case.batch_dims))
    ]
    log = OperationLog()
    number = 0

    def logged(model: nn.Module, batch: Any) -> Tensor:
        nonlocal number
        number += 1
        if number < len(batches):
            value: Tensor = loss(model, batch)
            return value
        with log:
            last: Tensor = loss(model, batch)
        return last

    with warnings.catch_warnings(), without_planted_faults():
        warnings.simplefilter("ignore")
        try:
            model = build_model(setting.case).double()
            train(setting.case, model, batches, "gradients", setting.training, logged)
        except BadCase:
            return None
    return log.found({})
