"""A step that is wrong on one rank, too, shows the line that leaves the loss of the case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_equivalence import Case
from ddp_equivalence.diagnosis.where.whereabouts import LOOK_FIRST
from tests.diagnosis.where.faulty import average, unnamed

LENGTH = 8


class Tagger(nn.Module):
    """Scores for every token of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Any:
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


def sequences(generator: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.randint(2, LENGTH + 1, (12, 1), generator=generator)
    return {
        "tokens": torch.randint(0, 11, (12, LENGTH), generator=generator),
        "tags": torch.randint(0, 5, (12, LENGTH), generator=generator),
        "mask": (torch.arange(LENGTH) < lengths).double(),
        "reward": torch.randn(12, LENGTH, generator=generator),
    }


def cross_entropies(model: Any, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["tokens"]).transpose(1, 2)
    return functional.cross_entropy(scores, batch["tags"], reduction="none")


def masked_mean(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of each sequence over its tokens, and then over sequences."""
    each = (cross_entropies(model, batch) * batch["mask"]).sum(1) / batch["mask"].sum(1)
    return each.mean()


def masks_before(tags: Tensor, mask: Tensor) -> Tensor:
    previous = torch.zeros_like(mask)
    previous[:, 1:] = mask[:, :-1]  # mask_is_shifted
    return previous


def mask_is_shifted(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """The mask is moved by one token, in a helper."""
    mask = masks_before(shard["tags"], shard["mask"])
    each = (cross_entropies(model, shard) * mask).sum(1) / shard["mask"].sum(1)
    each.mean().backward()
    average(model)


class Objective:
    """Computes the cross entropy by hand, as torch does it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def entropies(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self.model(batch["tokens"])
        chosen: Tensor = scores.log_softmax(-1).gather(-1, batch["tags"][..., None])
        return -chosen.squeeze(-1)

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        masked = self.entropies(batch) * batch["mask"]
        lengths = (batch["mask"] >= 0).sum(1)  # counts_what_is_masked
        return (masked.sum(1) / lengths).mean()


def counts_what_is_masked(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """The loss is written in another way, which is right, and counts wrongly."""
    Objective(model)(shard).backward()
    average(model)


class SparseTagger(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, sparse=True)


def of_all_ranks(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)


def joined(total: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    total[rows] += values  # adds_rows_once
    return total


def adds_rows_once(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """Of several rows of a sparse gradient with the same index one remains."""
    masked_mean(model, shard).backward()
    weight = model.embed.weight
    rows = of_all_ranks(weight.grad._indices()[0])
    values = of_all_ranks(weight.grad._values()) / rank.world_size
    weight.grad = joined(torch.zeros_like(weight), rows, values)
    for parameter in [*model.mix.parameters(), *model.out.parameters()]:
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


TAGS = Case(model=Tagger, batch=sequences, loss=masked_mean, layout="1x2")


@pytest.mark.parametrize(
    ("case", "step"),
    [
        (TAGS, mask_is_shifted),
        (TAGS, counts_what_is_masked),
        (replace(TAGS, model=SparseTagger), adds_rows_once),
        (replace(TAGS, layout="1x1"), mask_is_shifted),
        (replace(TAGS, shards="7+5"), counts_what_is_masked),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_that_leaves_the_loss_of_the_case_is_marked(case: Case, step: Any) -> None:
    where = unnamed(case, step)
    text = Path(__file__).read_text("utf-8").splitlines()
    marked = [n for n, line in enumerate(text, 1) if line.endswith(f"# {step.__name__}")]
    assert where.is_right_alone is (None if case.layout == "1x1" else False)
    assert where.marks == LOOK_FIRST
    assert any(one.is_fault for one in where.lines)
    # The lines that were seen to write the gradient come before the line that makes it.
    first = 3 if where.kind == "reduction" else 2
    assert marked[0] in [one.line.number for one in where.lines[:first]]
