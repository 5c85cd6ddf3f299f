"""A real model may hold complex buffers, such as the rotations of rotary embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, Case, Rank, check
from ddp_equivalence.report.script import export

WORDS, WIDTH, LENGTH = 23, 8, 6


class Rotated(nn.Module):
    """Embeddings that are rotated by their positions, as the attention of Llama does."""

    rotations: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        angles = torch.outer(torch.arange(LENGTH), 10.0 ** -torch.arange(WIDTH // 2))
        rotations = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("rotations", rotations, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        pairs = self.words(ids).unflatten(-1, (-1, 2))
        rotated = torch.view_as_complex(pairs.contiguous()) * self.rotations
        mixed: Tensor = self.mixed(torch.view_as_real(rotated).flatten(-2).to(pairs.dtype))
        return mixed.tanh() @ self.words.weight.T


def sentences(generator: torch.Generator) -> Tensor:
    return torch.randint(0, WORDS, (8, LENGTH), generator=generator)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def not_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()


def rotated_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The imaginary parts are lost, as ``model.to(dtype)`` would lose them."""
    assert isinstance(model, Rotated)
    model.rotations = torch.complex(model.rotations.real, torch.zeros_like(model.rotations.real))
    averaged(model, shard, rank)


def case(dtype: torch.dtype | None = torch.float64) -> Case:
    return Case(model=Rotated, batch=sentences, loss=loss, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None], ids=str)
def test_a_model_with_complex_buffers_is_compared(dtype: torch.dtype | None) -> None:
    assert check(case(dtype), averaged).outcome == "same"
    verdict = check(case(dtype), not_averaged)
    assert (verdict.outcome, verdict.causes) == ("different", ("no_all_reduce",))


def test_the_imaginary_parts_count() -> None:
    assert check(case(), rotated_back).outcome == "different"


def test_no_script_is_offered_since_it_would_be_refused(tmp_path: Path) -> None:
    verdict = check(case(), not_averaged)
    assert "--export-repro" not in verdict.full_report()
    with pytest.raises(BadCase, match="without complex buffers"):
        export(case(), not_averaged, tmp_path)
    assert not list(tmp_path.iterdir())
