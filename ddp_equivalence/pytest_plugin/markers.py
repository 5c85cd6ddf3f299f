"""The plugin's markers, and what their arguments may be."""

from __future__ import annotations

import pytest

from ddp_equivalence.case.settings import RIGHT_TRIAL_SECONDS

MARKERS = (
    "gloo_fallback: runs on gloo and the CPU because there is no GPU for NCCL",
    "gloo: runs on gloo and the CPU because gloo was chosen",
    "gloo_cuda: runs on gloo with CUDA tensors",
    "nccl: runs on an NCCL backend, one rank per GPU",
    "nccl_shared: runs on NCCL whose ranks share GPUs, because there are too few",
    "emulated: one process on the CPU does what nn.DataParallel does on several GPUs",
    "data_parallel: runs the real nn.DataParallel on two or more GPUs",
    "data_parallel_shared: runs the real nn.DataParallel with several replicas on one GPU",
    "difference: the case is known to differ from one big batch",
    "ddp(deadline, collective_deadline, fresh_ranks, in_process, allow_changes, second_look, "
    "trial_seconds): settings of the checks made by this test",
    "self_check: checks made by this test are left out of the closing table",
    "planted_fault(name): the table counts checks made by this test as plantings of this fault",
    "trial(strategy, layout, lane): one case of the catalogue, for the closing table",
)

MARKER_SETTINGS = {
    "deadline": "a number of seconds above 0",
    "collective_deadline": "a number of seconds above 0",
    "fresh_ranks": "True or False",
    "in_process": "True or False",
    "allow_changes": "True or False",
    "second_look": "True or False",
    "trial_seconds": RIGHT_TRIAL_SECONDS,
}
"""Setting of ``@pytest.mark.ddp`` -> the values that it accepts."""


def check_markers(item: pytest.Item) -> None:
    """Raises UsageError for a marker of the test whose arguments cannot be right."""
    for marker in item.iter_markers("ddp"):
        _check_settings(f"{item.nodeid}: @pytest.mark.ddp", marker)
    for marker in item.iter_markers("planted_fault"):
        if len(marker.args) != 1 or not _is_fault(marker.args[0]):
            right = "the name of one fault, such as sum_not_mean"
            raise pytest.UsageError(f"{_as_written(item, marker)}: expected {right}")
    for marker in item.iter_markers("trial"):
        if len(marker.args) != 3:
            right = "strategy, layout and lane"
            raise pytest.UsageError(f"{_as_written(item, marker)}: expected {right}")


def _as_written(item: pytest.Item, marker: pytest.Mark) -> str:
    return f"{item.nodeid}: @pytest.mark.{marker.name}({', '.join(map(repr, marker.args))})"


def _is_fault(name: object) -> bool:
    from ddp_equivalence.faults import FAULTS

    return isinstance(name, str) and name in FAULTS


def _check_settings(where: str, marker: pytest.Mark) -> None:
    names = ", ".join(MARKER_SETTINGS)
    for value in marker.args:
        raise pytest.UsageError(f"{where}({value!r}): expected name=value with one of {names}")
    for name, value in marker.kwargs.items():
        if name not in MARKER_SETTINGS:
            raise pytest.UsageError(f"{where}({name}): expected one of {names}")
        right = MARKER_SETTINGS[name]
        is_bool = isinstance(value, bool)
        may_be_zero = name == "trial_seconds" and value == 0
        is_number = isinstance(value, int | float) and not is_bool
        is_seconds = is_number and (0 < value < float("inf") or may_be_zero)
        if not (is_bool if right == "True or False" else is_seconds):
            raise pytest.UsageError(f"{where}({name}={value!r}): expected {right}")
    deadline, collective = map(marker.kwargs.get, ("deadline", "collective_deadline"))
    if deadline is not None and collective is not None and collective >= deadline:
        raise pytest.UsageError(
            f"{where}(collective_deadline={collective!r}): must be below the deadline, {deadline!r}"
        )
