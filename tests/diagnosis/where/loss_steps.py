"""Steps whose own loss is not that of the case. The line that makes it another one ends with the
step's name, as a comment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.diagnosis.where.faulty import average

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


def rewarded(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Rewards count by how far they are from the mean of their sequence."""
    baseline = torch.stack([row.mean() for row in batch["reward"]])
    return (cross_entropies(model, batch) * (batch["reward"] - baseline[:, None])).mean()


@dataclass
class Episode:
    """Attributes are computed when they are read."""

    reward: Tensor

    @property
    def advantage(self) -> Tensor:
        return self.reward - self.reward.mean()  # one_baseline_for_all


def one_baseline_for_all(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """The baseline of a sequence is that of all sequences, in a property."""
    entropies = cross_entropies(model, shard)
    (entropies * Episode(shard["reward"]).advantage).mean().backward()
    average(model)


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


def in_micro_batches(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """Each of two micro-batches takes the lengths of the first one."""
    parts = [{key: rows.chunk(2)[k] for key, rows in shard.items()} for k in range(2)]
    lengths = [parts[0]["mask"].sum(1) for part in parts]
    for part, length in zip(parts, lengths, strict=True):
        each = (cross_entropies(model, part) * part["mask"]).sum(1) / length  # in_micro_batches
        (each.mean() / 2).backward()
    average(model)


def cooled(scores: Tensor) -> Tensor:
    cool: Tensor = scores.mul_(0.5).log_softmax(-1)  # changed_in_place
    return cool


def changed_in_place(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """A function changes its argument in place, and what is read after it."""
    scores = model(shard["tokens"])
    confidence = cooled(scores.flatten(0, 1)).exp().amax(-1).detach()
    entropies = functional.cross_entropy(scores.transpose(1, 2), shard["tags"], reduction="none")
    each = (entropies * shard["mask"]).sum(1) / shard["mask"].sum(1)
    (each.mean() + 0.0 * confidence.sum()).backward()
    average(model)
