"""Which GPUs a build of torch has kernels for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_equivalence.commands.doctor.problems import has_kernels


@pytest.mark.parametrize(
    ("capability", "entries", "fits"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),  # a later one of the same generation
        ((8, 0), ["sm_86"], False),
        ((7, 0), ["sm_75", "sm_80"], False),  # torch's index for CUDA 13 has no sm_70
        ((9, 0), ["sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # the driver compiles it
        ((12, 0), ["sm_90", "compute_90a"], False),
        ((8, 0), ["compute_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["compute_100f"], False),
        ((12, 1), ["sm_100", "sm_120"], True),
        ((9, 0), [], True),
        ((9, 0), ["gfx942"], True),  # not NVIDIA's
    ],
)
def test_which_entries_fit(capability: tuple[int, int], entries: list[str], fits: bool) -> None:
    assert has_kernels(capability, entries) is fits


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
@pytest.mark.parametrize("code", [75, 80, 86, 90, 100, 120])
def test_torch_says_the_same_of_machine_code(capability: tuple[int, int], code: int) -> None:
    """Torch's rule is private: the test is skipped where torch has none."""
    cuda: Any = torch.cuda
    if not hasattr(cuda, "_code_compatible_with_device"):
        pytest.skip("this torch has no such rule")
    device = 10 * capability[0] + capability[1]
    expected = bool(cuda._code_compatible_with_device(device, code))
    assert has_kernels(capability, [f"sm_{code}"]) is expected
