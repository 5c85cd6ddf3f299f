"""At most one worker of pytest-xdist for each GPU.

A set of ranks that works has its GPUs for itself: kernels of NCCL wait busily for the other ranks,
so that several sets on one GPU would take each other's time. More workers would wait for the GPU in
turn, and each would start ranks of its own there.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddp_equivalence.report.record import Record
from ddp_equivalence.report.wrapping import plural

WHY = "ranks of several workers would wait in turn for the same GPU"


def fewer(config: pytest.Config, gpus: int) -> str:
    """Lower the number of workers to that of GPUs, before xdist starts them.

    Returns what was changed, or "". Without GPUs nothing is changed.
    """
    given = config.getoption("numprocesses", None) or 0
    if not 0 < gpus < given:
        return ""
    if gpus == 1:
        config.option.dist, config.option.numprocesses, config.option.tx = "no", 0, []
        return f"-n {given} became one process, as there is one GPU: {WHY}"
    config.option.numprocesses, config.option.tx = gpus, ["popen"] * gpus
    return f"-n {given} became -n {gpus}, one worker for each GPU: {WHY}"


def too_many(config: pytest.Config, records: Sequence[Record]) -> str:
    """What the table says of a run with more workers than GPUs; "" otherwise."""
    workers = config.getoption("numprocesses", None) or 0
    if not workers or not any(record.gpu for record in records):
        return ""
    from ddp_equivalence.pytest_plugin.suite_run.gpus_used import gpus_used  # imports torch

    gpus = gpus_used(records)
    if len(gpus) >= workers:
        return ""
    count = f"{len(gpus)} {plural(len(gpus), 'GPU that was', 'GPUs that were')} used"
    return f"-n {workers} was more than the {count}: {WHY}; fewer workers may be faster"
