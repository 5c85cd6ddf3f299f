"""The big batch of a case from the catalogue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ddp_equivalence.report.script.template.placeholders import (
    EXAMPLES,
    OUTPUT_SIZE,
    PADDED,
    loss_targets,
    model_inputs,
)


def make_batch(generator: torch.Generator) -> Any:
    inputs = model_inputs(generator, EXAMPLES)
    targets = loss_targets(generator, inputs, SimpleNamespace(output_size=OUTPUT_SIZE))
    return {"inputs": inputs, "targets": targets}


def make_padded_batch(generator: torch.Generator) -> Any:
    """All targets of the last rank are padding."""
    inputs = model_inputs(generator, EXAMPLES)
    targets = loss_targets(generator, inputs, SimpleNamespace(output_size=OUTPUT_SIZE))
    targets[PADDED] = -100
    return {"inputs": inputs, "targets": targets}
