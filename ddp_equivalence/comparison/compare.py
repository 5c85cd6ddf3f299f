"""Compare gradients that are all in the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ddp_equivalence.case.errors import SuiteBug
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparator import Comparator
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.gradients import Description, describe, in_first_step
from ddp_equivalence.comparison.tolerance import Noise, Tolerance


def compare(
    expected: Mapping[str, Tensor | None],
    measured: Mapping[int, Mapping[str, Tensor | None]],
    tolerance: Tolerance,
    noise: Mapping[str, Noise] | None = None,
) -> Comparison:
    """Compare the gradients of every rank, ``measured[rank][name]``, with the expected ones.

    ``expected`` are the true gradients, in float64. Raises SuiteBug if a measured gradient shares
    its memory with the expected one, since comparing a gradient with itself shows nothing.
    """
    truth = in_first_step(expected)
    described = {
        key: description and Description(description.shape, tolerance.dtype, description.layout)
        for key, description in describe(truth).items()
    }
    comparator = Comparator(truth, described, tolerance)
    for rank, by_name in measured.items():
        gradients = in_first_step(by_name)
        for key, gradient in gradients.items():
            _check_memory(rank, key, gradient, truth.get(key))
        comparator.begin(rank, describe(gradients))
        for chunk in chunks(gradients):
            comparator.add(rank, chunk)
    return comparator.finish({(0, name): value for name, value in (noise or {}).items()})


def _check_memory(
    rank: int, key: GradientKey, gradient: Tensor | None, expected: Tensor | None
) -> None:
    if gradient is None or expected is None or not gradient.numel():
        return
    if gradient.is_sparse or expected.is_sparse:
        return
    if gradient.data_ptr() == expected.data_ptr():
        raise SuiteBug(f"{key[1]} of rank {rank} is the reference itself: same memory")
