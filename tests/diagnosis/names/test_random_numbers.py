"""Whatever draws random numbers is named as that, and a loss that is no mean over counts is not
called one.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Rank, check
from tests.diagnosis.names.small_case import (
    Loss,
    average,
    build_model,
    by_hand,
    case,
    make_batch,
    squares,
    under_ddp,
)

pytestmark = pytest.mark.self_check


class Layers(nn.Module):
    """Three linear layers. A subclass draws, or couples examples, between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(5, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Any:
        hidden = self.changed(torch.tanh(self.first(rows)))
        return self.last(hidden + torch.tanh(self.middle(hidden)))

    def changed(self, hidden: Tensor) -> Tensor:
        return hidden


class FunctionalDropout(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.3, training=True)


class StochasticDepth(Layers):
    def forward(self, rows: Tensor) -> Any:
        hidden = torch.tanh(self.first(rows))
        kept = (torch.rand(len(rows), 1) < 0.7).to(hidden.dtype)
        return self.last(hidden + kept * torch.tanh(self.middle(hidden)) / 0.7)


class PythonsDepth(Layers):
    """Stochastic depth with the generator of Python's module random."""

    def forward(self, rows: Tensor) -> Any:
        hidden = torch.tanh(self.first(rows))
        kept = hidden.new_tensor([[float(random.random() < 0.7)] for _ in rows])
        return self.last(hidden + kept * torch.tanh(self.middle(hidden)) / 0.7)


class Latent(Layers):
    """The noise of a variational autoencoder."""

    def changed(self, hidden: Tensor) -> Tensor:
        return hidden + torch.exp(hidden / 2) * torch.randn_like(hidden)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Any:
        tokens = torch.stack([rows[:, :4], rows[:, 1:], rows[:, :4] * 2], dim=1)
        return self.last(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def denoised(model: nn.Module, batch: Any) -> Tensor:
    """A loss of a diffusion model, with random timesteps."""
    rows = batch["rows"]
    angle = torch.randint(0, 100, (len(rows), 1)) / 100 * math.pi / 2
    noise = torch.randn_like(rows)
    noisy = torch.cos(angle).to(rows.dtype) * rows + torch.sin(angle).to(rows.dtype) * noise
    return F.mse_loss(model(noisy), noise[:, :3])


RANDOM: list[tuple[Any, Loss]] = [
    *((model, squares) for model in (FunctionalDropout, StochasticDepth, PythonsDepth)),
    *((model, squares) for model in (Latent, Attention)),
    (Layers, denoised),
]


@pytest.mark.parametrize("layout", ["1x2", "1x4"])
@pytest.mark.parametrize("reduced", [by_hand, under_ddp])
@pytest.mark.parametrize(("model", "loss"), RANDOM)
def test_whatever_draws_is_compared_with_the_numbers_that_the_ranks_drew(
    model: Any, loss: Loss, reduced: Any, layout: str
) -> None:
    verdict = check(case(layout, model=model, loss=loss), reduced(loss))
    assert (verdict.outcome, verdict.cause) == ("same", None), verdict
    assert verdict.numbers_are_known
    assert verdict.error is not None
    assert verdict.limit is not None
    assert verdict.error <= verdict.limit


def test_the_random_numbers_of_several_steps_are_a_difference_that_is_named() -> None:
    verdict = check(case("1x2", model=FunctionalDropout), by_hand(squares), steps=2)
    assert verdict.causes == ("dropout_differs_from_reference",), verdict


def leaves_out_rank_1(model: nn.Module, shard: Any, rank: Rank) -> None:
    squares(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= rank.rank != 1
    average(model, rank.world_size)


@pytest.mark.parametrize("model", [FunctionalDropout, Attention, PythonsDepth])
def test_random_numbers_excuse_no_rank_that_is_left_out(model: Any) -> None:
    verdict = check(case("1x4", model=model), leaves_out_rank_1)
    assert verdict.causes == ("rank_left_out",), verdict


class Normalised(Layers):
    """A batch norm that is written by hand."""

    def changed(self, hidden: Tensor) -> Tensor:
        return (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()


class Centred(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class WithBuffer(Layers):
    """A buffer follows the mean of the batch, and the forward pass uses it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def changed(self, hidden: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        return hidden - self.mean


def root_of_squares(model: nn.Module, batch: Any) -> Tensor:
    return squares(model, batch).sqrt()


def quantile(model: nn.Module, batch: Any) -> Tensor:
    return torch.quantile((model(batch["rows"]) - batch["targets"]).abs().mean(1), 0.7)


def median(model: nn.Module, batch: Any) -> Any:
    return (model(batch["rows"]) - batch["targets"]).abs().mean(1).median()


def with_ages(generator: torch.Generator) -> dict[str, Tensor]:
    """A leaf of the same length that the loss does not use."""
    return make_batch(generator) | {"age": torch.randint(1, 90, (12,), generator=generator)}


NOT_ADDITIVE: list[tuple[Any, Loss, Any]] = [
    *((model, squares, make_batch) for model in (Normalised, Centred, WithBuffer)),
    *((build_model, loss, make_batch) for loss in (root_of_squares, quantile, median)),
    (build_model, root_of_squares, with_ages),
]


@pytest.mark.parametrize("layout", ["1x2", "1x4"])
@pytest.mark.parametrize("reduced", [by_hand, under_ddp])
@pytest.mark.parametrize(("model", "loss", "batch"), NOT_ADDITIVE)
def test_a_loss_that_is_no_mean_over_counts_is_not_called_one(
    model: Any, loss: Loss, batch: Any, reduced: Any, layout: str
) -> None:
    verdict = check(case(layout, model=model, loss=loss, batch=batch), reduced(loss))
    wrong = {"token_counts_weighted_equally", "uneven_shards_weighted_equally"}
    assert verdict.outcome == "different"
    assert not (wrong | {"contrastive_local_negatives"}) & set(verdict.causes), verdict
