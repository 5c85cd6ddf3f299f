"""Models that make a right step look wrong, by unused, shared or frozen parameters for example."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.equivalence.small_regression import OUTPUTS, ROW, Batch, make_batch


class Branch(nn.Module):
    """Only examples whose first value is above 5 pass through the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(ROW, OUTPUTS), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.trunk(rows)
        chosen = (rows[:, 0] > 5).nonzero().squeeze(1)
        if len(chosen):
            outputs = outputs.index_add(0, chosen, self.branch(rows[chosen]))
        return outputs


def with_two_that_branch(generator: torch.Generator) -> Batch:
    batch = make_batch(generator)
    batch["rows"][-2:, 0] = 6.0
    return batch


class UsedTwice(nn.Module):
    """One layer is applied twice; another shares its weight under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied = nn.Linear(ROW, ROW), nn.Linear(ROW, ROW)
        self.tied.weight = self.layer.weight
        self.last = nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(rows))))
        return self.last(self.tied(hidden))  # type: ignore[no-any-return]


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(ROW, 7), nn.Tanh(), nn.Linear(7, OUTPUTS))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class ZeroGradient(nn.Module):
    """``gate`` is multiplied by zero: its gradient is zero, not None, on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(ROW, OUTPUTS), nn.Parameter(torch.randn(OUTPUTS))

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows) + 0.0 * self.gate  # type: ignore[no-any-return]


def batch_norm_in_eval() -> nn.Module:
    """In eval mode, every shard is normalised with the same stored statistics."""
    norm = nn.BatchNorm1d(7)
    norm.running_mean, norm.running_var = torch.randn(7), torch.rand(7) + 0.5
    return nn.Sequential(nn.Linear(ROW, 7), norm, nn.Tanh(), nn.Linear(7, OUTPUTS)).eval()


def dropout_in_eval() -> nn.Module:
    return nn.Sequential(nn.Linear(ROW, 7), nn.Dropout(0.5), nn.Linear(7, OUTPUTS)).eval()


class KeysOfAttention(nn.Module):
    """The gradient of the keys' bias is zero except for rounding: it cancels in the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = self.first(rows[..., None])
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.last(mixed.mean(dim=1))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """The activations of the first part are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(ROW, 7), nn.Tanh(), nn.Linear(7, 7))
        self.last = nn.Linear(7, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, rows, use_reentrant=False))  # type: ignore[no-any-return]


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(ROW, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, OUTPUTS))


class Mixed(nn.Module):
    """A float64 model with a float32 part; a check with ``dtype=None`` keeps both."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(ROW, 7).double(), nn.Linear(7, OUTPUTS).float()

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(rows.to(self.wide.weight.dtype)))
        outputs: Tensor = self.narrow(hidden.to(self.narrow.weight.dtype))
        return outputs.to(rows.dtype)
