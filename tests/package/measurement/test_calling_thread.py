"""Backward passes run on the calling thread as long as something watches it, and no longer."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ddp_equivalence.measurement.observer import backward_on_calling_thread


def may_use_other_threads() -> bool:
    return torch._C._is_multithreading_enabled()


def test_other_threads_may_be_used_again_when_the_last_of_several_blocks_has_ended() -> None:
    log, observed = ExitStack(), ExitStack()
    log.enter_context(backward_on_calling_thread())
    observed.enter_context(backward_on_calling_thread())
    log.close()  # it began first, and ends first
    assert not may_use_other_threads()
    observed.close()
    assert may_use_other_threads()


def test_what_the_step_itself_had_chosen_comes_back() -> None:
    with torch.autograd.set_multithreading_enabled(False):
        with backward_on_calling_thread():
            assert not may_use_other_threads()
        assert not may_use_other_threads()
    assert may_use_other_threads()
