"""The log of a script's operations goes beside modes that the script has begun itself."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from ddp_equivalence.observed_scripts.in_script.closer_look import LoggedOperations


def test_no_log_begins_inside_a_mode_of_the_script() -> None:
    with FlopCounterMode(display=False):
        assert LoggedOperations.begun() is None
    assert _get_current_dispatch_mode() is None


def test_a_mode_of_the_script_may_begin_and_end_inside_the_log() -> None:
    log = LoggedOperations.begun()
    assert log is not None
    with FlopCounterMode(display=False) as counter:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.get_total_flops() == 16
    assert log.stop()
    assert _get_current_dispatch_mode() is None


def test_a_log_does_not_end_inside_a_mode_that_the_script_has_begun_since() -> None:
    log = LoggedOperations.begun()
    assert log is not None
    with FlopCounterMode(display=False):
        assert not log.stop()
    assert log.stop()
