"""A small CTC speech recogniser; lengths are fractions, as in many speech toolkits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

MELS, VOCABULARY, BLANK, LONGEST_TEXT = 8, 7, 0, 4
FRAMES = (40, 34, 36, 31, 38, 29, 22, 20, 24, 18, 21, 16)

Batch = dict[str, Tensor]


class Recogniser(nn.Module):
    """Every output frame depends on the frames around it only."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.frontend = nn.Conv1d(MELS, width, kernel_size=3, padding=1)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.frontend(features.transpose(1, 2))).transpose(1, 2)
        return self.output(hidden).log_softmax(dim=-1)


def ctc(log_probs: Tensor, batch: Batch) -> Tensor:
    """The loss per utterance, averaged over utterances."""
    frames = (batch["lengths"] * log_probs.shape[1]).round().long()
    per_utterance = F.ctc_loss(
        log_probs.transpose(0, 1),
        batch["texts"],
        frames,
        batch["text_lengths"],
        blank=BLANK,
        reduction="none",
        zero_infinity=True,
    )
    return per_utterance.mean()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return ctc(model(batch["features"]), batch)


def make_batch(generator: torch.Generator) -> Batch:
    """Features are padded with zeros; `lengths` are relative to the longest utterance."""
    count, longest = len(FRAMES), max(FRAMES)
    features = torch.zeros(count, longest, MELS)
    for row, frames in enumerate(FRAMES):
        features[row, :frames] = torch.randn(frames, MELS, generator=generator)
    return {
        "features": features,
        "lengths": torch.tensor(FRAMES) / longest,
        "texts": torch.randint(1, VOCABULARY, (count, LONGEST_TEXT), generator=generator),
        "text_lengths": torch.randint(2, LONGEST_TEXT + 1, (count,), generator=generator),
    }


case = Case(model=Recogniser, batch=make_batch, loss=loss, layout="1x2")


def trim_padding(batch: Batch) -> Batch:
    """Drop the frames that are padding for every utterance of this rank."""
    features = batch["features"]
    longest = int((batch["lengths"] * features.shape[1]).round().max())
    lengths = batch["lengths"]
    return {**batch, "features": features[:, :longest], "lengths": lengths}


class Brain:
    """The training loop's part of the recipe."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.rank = rank
        self.modules = DistributedDataParallel(model)

    def compute_forward(self, batch: Batch) -> Tensor:
        return self.modules(batch["features"])

    def compute_objectives(self, log_probs: Tensor, batch: Batch) -> Tensor:
        return ctc(log_probs, batch)

    def fit_batch(self, batch: Batch) -> float:
        batch = trim_padding(batch)
        log_probs = self.compute_forward(batch)
        objective = self.compute_objectives(log_probs, batch)
        objective.backward()
        return objective.item()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Brain(model, rank).fit_batch(shard)
