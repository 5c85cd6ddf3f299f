"""Which GPUs the ranks get, on machines with a different number of them."""

from __future__ import annotations

from tests.gpu_rehearsal.rehearsal import rehearse


def test_two_ranks_get_a_gpu_each() -> None:
    rehearsed = rehearse("ddp_equivalence", "doctor", gpus=2)
    assert rehearsed.returncode == 0, rehearsed.output
    assert "nccl           works" in rehearsed.output
    assert {context.gpu for context in rehearsed.contexts} == {0, 1}
    assert not rehearsed.initialised_by_no_rank()
