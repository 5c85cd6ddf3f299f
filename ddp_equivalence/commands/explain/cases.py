"""The big batches that a verification compares with. They have a small model and a mean loss."""

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

FEWEST_TOKENS = 3
"""The fewest tokens of an example. Two examples with one token each may well be the same, and then
nothing shows how often each of them counts.
"""


def case_of(setup: Setup, steps: int) -> Case:
    """The big batch: a mean loss over the effective batch, even if the ranks take another loss."""
    ranks = setup.processes // setup.nodes
    layout, total = f"{setup.nodes}x{ranks}", setup.effective_batch * steps
    if setup.loss == "token-mean":
        batch = partial(token_batch, setup.effective_batch, steps)
        return Case(model="gru_tied", loss="token_mean", batch=batch, layout=layout)
    batch = partial(labelled_batch, total)
    return Case(model="mlp", loss="cross_entropy_mean", batch=batch, layout=layout)


def counts_of(setup: Setup) -> Sequence[int]:
    """How much each example of a step weighs in the big batch's mean: 1, or its tokens."""
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
    """Token ids and targets, shape (examples x steps, 9).

    Later examples of a step have more tokens that count, so that the first and the last part of a
    step never have equally many. A single example has one token; otherwise each example has at
    least FEWEST_TOKENS.
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
    more = SEQUENCE_LENGTH - FEWEST_TOKENS + 1
    return [FEWEST_TOKENS + index * more // examples for index in range(examples)]
