"""A model that computes in float32 inside float64 is held to what it really rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case
from ddp_equivalence.case.build import build_batches, build_model, one_thread
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparison import Comparator, Comparison
from ddp_equivalence.comparison.gradients import describe
from ddp_equivalence.comparison.rounding import Expected, NudgedInside
from ddp_equivalence.comparison.tolerance import Tolerance
from ddp_equivalence.measurement.measure import finished
from ddp_equivalence.reference import big_batch

pytestmark = pytest.mark.self_check

EPS = torch.finfo(torch.float32).eps
WORDS, LENGTH, WIDTH = 31, 8, 12


class Narrow(nn.Module):
    """A language model with one layer of attention; ``parts`` are computed in float32."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        self.parts = parts.split()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        values = self.embed(ids)
        inside = values.float() if "norm" in self.parts else values
        inside = inside * torch.rsqrt(inside.square().mean(-1, keepdim=True) + 1e-6)
        values = self.scale * inside.to(values.dtype)
        scores = self.query(values) @ self.key(values).transpose(1, 2)
        dtype = torch.float32 if "softmax" in self.parts else None
        values = values + F.softmax(scores, -1, dtype=dtype).to(values.dtype) @ values
        output: Tensor = self.head(values)
        return output.float() if "scores" in self.parts else output


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Twelve sentences of different length; words behind their end are -100."""
    ids = torch.randint(WORDS, (12, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (12, 1), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1).where(torch.arange(LENGTH) < lengths, -100)}


def token_loss(model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    scores = model(batch["ids"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def case_of(parts: str, seed: int = 0, **changes: Any) -> Case:
    fields: dict[str, Any] = {"model": partial(Narrow, parts), "batch": batch, "loss": token_loss}
    return Case(**(fields | {"layout": "1x3", "seed": seed} | changes))


Loss = Callable[[nn.Module, Any], Tensor]
"""The mean over the words of a batch."""


def by_three_ranks(case: Case, loss: Loss, pieces: int, weights: tuple[float, ...]) -> Any:
    """The gradients that three ranks would share, each with its examples in several pieces."""
    model, (whole,) = build_model(case), build_batches(case)
    words = [int((rows != -100).sum()) for rows in whole["labels"].chunk(3 * pieces)]
    parts = zip(*(leaf.chunk(3 * pieces) for leaf in whole.values()), strict=True)
    for number, (part, count) in enumerate(zip(parts, words, strict=True)):
        weight = weights[number // pieces] * count / sum(words)
        (weight * loss(model, dict(zip(whole, part, strict=True)))).backward()
    return {(0, name): parameter.grad for name, parameter in model.named_parameters()}


def judged(
    case: Case,
    loss: Loss = token_loss,
    pieces: int = 1,
    weights: tuple[float, ...] = (1.0, 1.0, 1.0),
) -> Comparison:
    """What a check decides on these gradients, without ranks."""
    expected = Expected(big_batch(case))
    tolerance = Tolerance(torch.float64)
    comparator = Comparator(expected.reference.expected, expected.described, tolerance)
    gradients: dict[GradientKey, Tensor | None] = by_three_ranks(case, loss, pieces, weights)
    comparator.begin(0, describe(gradients))
    for chunk in chunks(gradients):
        comparator.add(0, chunk)
    return finished(comparator, expected, tolerance, autocast=None)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


PARTS = ["scores", "norm", "softmax", "scores norm softmax"]


@pytest.mark.parametrize("parts", PARTS)
def test_right_gradients_are_the_same_although_parts_compute_in_float32(parts: str) -> None:
    for seed in range(2):
        for pieces in (1, 4):
            comparison = judged(case_of(parts, seed), pieces=pieces)
            assert comparison.same, (seed, pieces)
            assert not comparison.has_useless_limits


@pytest.mark.parametrize("parts", PARTS)
def test_a_rank_with_a_slightly_wrong_weight_is_different(parts: str) -> None:
    comparison = judged(case_of(parts), pieces=2, weights=(1.0, 1.0001, 1.0))
    assert not comparison.same
    assert not comparison.may_be_rounding


@pytest.mark.parametrize("parts", PARTS)
def test_the_limit_says_that_the_model_computes_in_float32(parts: str) -> None:
    rounding = Expected(big_batch(case_of(parts))).rounding
    assert rounding.inside is torch.float32
    assert not rounding.order_matters
    comparison = judged(case_of(parts), weights=(1.0, 1.0001, 1.0))
    limits = {parameter.key[1]: parameter.limit for parameter in comparison.parameters}
    reason = "8 x the error of one device, computing in float32 inside float64"
    assert limits["embed.weight"].reason == reason
    assert EPS / 4 < limits["embed.weight"].floor < 32 * EPS


def test_a_gradient_that_is_zero_except_for_rounding_in_float32_is_known() -> None:
    """A key's bias adds the same to all scores of a row, which a softmax does not see."""
    comparison = judged(case_of("softmax"), pieces=2)
    bias = next(one for one in comparison.parameters if one.key[1] == "key.bias")
    assert bias.norm > 0
    assert bias.limit.only_rounding
    assert comparison.worst is not None
    assert comparison.worst is not bias  # its error relative to that gradient says nothing
    beyond = replace(bias, by_rank=(replace(bias.worst, error=1e9, within=False),))
    assert replace(comparison, parameters=(beyond, comparison.worst)).worst is beyond
    assert replace(comparison, parameters=(bias,)).worst is bias


def test_a_model_in_float64_keeps_its_limits() -> None:
    rounding = Expected(big_batch(case_of(""))).rounding
    assert rounding.inside is None
    comparison = judged(case_of(""), weights=(1.0, 1.0 + 1e-11, 1.0))
    assert not comparison.same
    assert all("float32" not in one.limit.reason for one in comparison.parameters)


def loss_by_place(model: nn.Module, batch: Any) -> Tensor:
    """The mean over the sentences, of which the later ones count more."""
    scores = model(batch["ids"]).transpose(1, 2)
    by_word = F.cross_entropy(scores, batch["labels"], reduction="none")
    return (by_word.mean(1) * torch.linspace(1, 2, len(by_word))).mean()


def test_an_order_that_matters_is_not_taken_for_rounding() -> None:
    rounding = Expected(big_batch(case_of("scores", loss=loss_by_place))).rounding
    assert rounding.order_matters
    assert rounding.inside is torch.float32
    assert all(noise.norm < 1e-4 for noise in rounding.noise.values())


def test_values_that_no_operation_rounded_stay_as_they_are() -> None:
    exact = torch.arange(-8.0, 8.0) / 4
    rounded = torch.rand(16, generator=torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    with NudgedInside(1) as inside:
        assert torch.equal(exact * 3, torch.arange(-24.0, 24.0, 3.0) / 4)
        assert torch.equal(rounded.sort().values[-1:], rounded.amax(0, keepdim=True))
        assert torch.equal(rounded.clone()[::2], rounded[::2])
        unrounded = inside.lowest
        product = rounded.exp()
    assert (unrounded, inside.lowest) == (None, torch.float32)
    moved = (product - rounded.exp()).abs() / product
    assert bool((moved > EPS / 4).all())
    assert bool((moved < 4 * EPS).all())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_random_numbers_are_drawn_once() -> None:
    values = torch.rand(64)
    torch.manual_seed(0)
    expected = F.dropout(values, 0.5), torch.rand(3)
    torch.manual_seed(0)
    with NudgedInside(1):
        drawn = F.dropout(values, 0.5), torch.rand(3)
    assert torch.equal(drawn[0] == 0, expected[0] == 0)
    assert torch.equal(drawn[1], expected[1])


def transformers_model(kind: str) -> nn.Module:
    """A tiny model with random weights, from Hugging Face."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": WORDS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "gpt2":
        sizes |= {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return cast(nn.Module, transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    sizes |= {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": LENGTH}
    if kind == "llama":
        return cast(nn.Module, transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return cast(nn.Module, transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))


def widened_loss(model: nn.Module, batch: Any) -> Tensor:
    scores = model(input_ids=batch["ids"]).logits.float()
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_right_gradients_of_models_from_transformers_are_the_same(kind: str) -> None:
    case = case_of("", model=partial(transformers_model, kind), loss=widened_loss)
    right = judged(case, widened_loss, pieces=2)
    assert right.same
    assert not right.has_useless_limits
    wrong = judged(case, widened_loss, pieces=2, weights=(1.0, 1.001, 1.0))
    assert not wrong.same
    assert not wrong.may_be_rounding
