"""Dropout masks, missed waits and rounding on a GPU; ``numbers_on_gpus.py`` has the checks."""

from __future__ import annotations

from tests.gpu_rehearsal.rehearsal import rehearse

CHECKS = "tests/gpu_rehearsal/numbers_on_gpus.py"
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")

OF_THE_SUITE = (
    "tests/equivalence/test_manual_all_reduce.py",
    "tests/difference/test_manual_all_reduce_differs.py",
    "tests/diagnosis/test_planted_faults.py",
    "tests/package/test_own_models.py::test_no_fault_is_excused_because_the_model_has_dropout",
)

MASKS_AND_WAITS = (
    "(dropout-mse_mean and float64) or excused or (numbers_on_gpus and not limits_follow)"
)


def test_masks_and_missed_waits_are_seen_and_the_suite_promises_nothing_about_masks() -> None:
    rehearsed = rehearse(
        *PYTEST, CHECKS, *OF_THE_SUITE, "-k", MASKS_AND_WAITS, gpus=4, deferred=True
    )
    assert rehearsed.returncode == 0, rehearsed.output
    assert "33 passed" in rehearsed.output
    assert "known differences              4 of 4 differ, 4 of 4 under" in rehearsed.output
    assert "6 of 6 caught, 6 of 6 named" in rehearsed.output


def test_rounding_is_measured_on_the_device_of_a_rank() -> None:
    rehearsed = rehearse(*PYTEST, CHECKS, "-k", "limits_follow", gpus=2, strict=True)
    assert rehearsed.returncode == 0, rehearsed.output
    assert "1 passed" in rehearsed.output
