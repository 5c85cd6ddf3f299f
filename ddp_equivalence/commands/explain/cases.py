"""The big batches that a verification compares with: of a small model, with a mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.models.model import (
    OUTPUT_SIZE,
    ROW_SIZE,
    SEQUENCE_LENGTH,
    VOCABULARY_SIZE,
)
from ddp_equivalence.commands.explain.setup import Setup
from ddp_equivalence.commands.explain.steps import PADDING

FEWEST = 3
"""Tokens of an example: two examples of one token each may well be the same, and then nobody can
tell how often each counts.
"""


def case_of(setup: Setup, steps: int) -> Case:
    """The big batch: the mean loss over the effective batch, whatever the ranks' loss is."""
    ranks = setup.processes // setup.nodes
    layout, total = f"{setup.nodes}x{ranks}", setup.effective_batch * steps
    if setup.loss == "token-mean":
        batch = partial(token_batch, setup.effective_batch, steps)
        return Case(model="gru_tied", loss="token_mean", batch=batch, layout=layout)
    batch = partial(labelled_batch, total)
    return Case(model="mlp", loss="cross_entropy_mean", batch=batch, layout=layout)


def counts_of(setup: Setup) -> Sequence[int]:
    """What every example of a step counts in the big batch's mean: one, or its tokens."""
    if setup.loss == "token-mean":
        return _token_counts(setup.effective_batch)
    return [1] * setup.effective_batch


def labelled_batch(examples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of the small model, shape (examples, 7), and labels, shape (examples,)."""
    rows = torch.randn(examples, ROW_SIZE, generator=generator)
    return {
        "inputs": rows,
        "targets": torch.randint(OUTPUT_SIZE, (examples,), generator=generator),
    }


def token_batch(examples: int, steps: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Token ids and targets, shape (examples x steps, 9); later examples of a step have more
    tokens that count, so that its first and its last part never have as many. A single example
    has one; else they have FEWEST at least.
    """
    shape = (examples * steps, SEQUENCE_LENGTH)
    inputs = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
    targets = torch.randint(VOCABULARY_SIZE, shape, generator=generator)
    counts = torch.tensor(_token_counts(examples) * steps)
    padded = torch.arange(SEQUENCE_LENGTH) >= counts[:, None]
    return {"inputs": inputs, "targets": targets.masked_fill(padded, PADDING)}


def _token_counts(examples: int) -> list[int]:
    if examples == 1:
        return [1]
    more = SEQUENCE_LENGTH - FEWEST + 1
    return [FEWEST + index * more // examples for index in range(examples)]
