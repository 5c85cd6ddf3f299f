"""Digests of tensors do not depend on how a tensor lies in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddp_equivalence.comparison.gradients import bytes_of


@pytest.mark.parametrize("count", [0, 1])
def test_few_elements_that_were_expanded_have_the_bytes_of_their_values(count: int) -> None:
    expanded = torch.tensor(2.5, dtype=torch.float64).expand(count)
    assert expanded.stride() == (0,)
    assert bytes_of(expanded).tobytes() == count * np.float64(2.5).tobytes()
