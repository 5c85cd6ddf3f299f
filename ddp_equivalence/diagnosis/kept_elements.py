"""How many elements of the gradients a diagnosis keeps."""

from __future__ import annotations

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.expected import Expected

MAX_ELEMENTS = 2_000_000
"""Up to this many ranks x elements, the diagnosis keeps all elements; of more it keeps some."""

MAX_SELECTED = 200_000
"""The ranks x elements that are then kept: enough to tell causes apart, few beside the model."""


def kept_elements(expected: Expected, world_size: int) -> ElementSample[GradientKey]:
    """The elements that are kept of the gradients that so many ranks send."""
    sizes = {
        key: value.numel()
        for key, value in expected.reference.expected.items()
        if value is not None
    }
    if sum(sizes.values()) * world_size <= MAX_ELEMENTS:
        return ElementSample.at_most(MAX_ELEMENTS, sizes)
    return ElementSample.at_most(MAX_SELECTED // world_size, sizes)
