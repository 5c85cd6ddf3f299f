"""A watched step shows on NCCL the lines that it shows on the CPU."""

from __future__ import annotations

from tests.gpu_rehearsal.rehearsal import rehearse

STEPS = "tests/gpu_rehearsal/faulty_steps_on_gpus.py"
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--ddp-backend", "nccl")


def test_a_step_shows_on_nccl_the_lines_that_it_shows_on_the_cpu() -> None:
    rehearsed = rehearse(*PYTEST, STEPS, gpus=4)
    assert rehearsed.returncode == 0, rehearsed.output
    assert "5 passed" in rehearsed.output
