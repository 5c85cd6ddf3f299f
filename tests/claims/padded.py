"""Padded sequences whose tokens are classified, so that the loss is a mean over tokens. float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank
from tests.claims.ddp import Loss, wrapped
from tests.claims.setting import flat_gradient, model_and_batch

LONGEST = 6
PADDING = -100

Lengths = tuple[tuple[int, ...], tuple[int, ...]]


def sequences(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """One sequence for each length: tokens (n, 6, 5) and classes (n, 6), padded with -100.

    Sequences of the same length are equal, so that two ways to deal them out may be the same batch.
    """
    tokens, classes = [], []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        tokens.append(torch.randn(LONGEST, 5, generator=generator, dtype=torch.double))
        drawn = torch.randint(3, (LONGEST,), generator=generator)
        classes.append(torch.where(torch.arange(LONGEST) < length, drawn, PADDING))
    return torch.stack(tokens), torch.stack(classes)


def over_own_tokens(model: nn.Module, tokens: Tensor, classes: Tensor) -> Tensor:
    """The mean over the tokens that are not padding."""
    return _cross_entropy(model, tokens, classes, "mean")


def over_all_tokens(model: nn.Module, tokens: Tensor, classes: Tensor) -> Tensor:
    """The sum over own tokens, times the number of processes, divided by the tokens of all."""
    count = (classes != PADDING).sum()
    dist.all_reduce(count)
    return _cross_entropy(model, tokens, classes, "sum") * dist.get_world_size() / count


def big_token_batch(lengths: Lengths) -> tuple[Tensor, list[Tensor]]:
    """The gradient of all sequences in one batch, and the part of it from each process's share."""
    model, *_ = model_and_batch()
    over_own_tokens(model, *sequences(lengths[0] + lengths[1])).backward()
    expected = flat_gradient(model)
    parts = []
    for own in lengths:
        model.zero_grad()
        _cross_entropy(model, *sequences(own), "sum").backward()
        parts.append(flat_gradient(model) / sum(map(sum, lengths)))
    return expected, parts


def token_gradient(rank: Rank, lengths: Lengths, loss: Loss) -> Tensor:
    """The gradient that DDP leaves on this rank."""
    model, *_ = model_and_batch()
    ddp = wrapped(model, divides=True)
    loss(ddp, *sequences(lengths[rank.rank])).backward()
    gradient = flat_gradient(model)
    del ddp
    return gradient


def _cross_entropy(model: nn.Module, tokens: Tensor, classes: Tensor, reduction: str) -> Tensor:
    scores = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(
        scores, classes.flatten(), ignore_index=PADDING, reduction=reduction
    )
