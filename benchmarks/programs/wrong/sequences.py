"""Recurrent models and texts whose examples meet, or whose state differs between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.programs.common import (
    HIDDEN,
    LENGTH,
    OUTPUTS,
    ROW,
    TOKENS,
    Batch,
    LanguageModel,
    UnderDdp,
    average,
    mean_squared_error,
    sequences,
    texts,
    token_mean,
    words,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("sequences", right=False)


@programs.model(batch=sequences)
class StateKeptBetweenExamples(nn.Module):
    """The cell's state goes on from the last example to the next one of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        state, outputs = rows.new_zeros(1, HIDDEN), []
        for example in rows:
            state = self.cell(example.mean(0, keepdim=True), state)
            outputs.append(self.last(state))
        return torch.cat(outputs)


@programs.model(batch=words)
class PackedAndNotSortedBack(nn.Module):
    """Texts are sorted by length for packing, and the outputs stay in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, HIDDEN)
        self.layer, self.last = nn.LSTM(HIDDEN, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths, order = (1 + tokens[:, 0] % LENGTH).sort(descending=True)
        packed = pack_padded_sequence(self.table(tokens[order]), lengths, batch_first=True)
        outputs, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.last(outputs[:, 0])


@programs.model(batch=sequences)
class AttentionAcrossTheBatch(nn.Module):
    """Examples and positions are flattened into one sequence before the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(ROW, 12), nn.Linear(4, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        query, key, value = self.mix(rows.flatten(0, 1)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.last(mixed.view(len(rows), LENGTH, 4).mean(1))


@programs.model(batch=sequences)
class NormalisedOverTime(nn.Module):
    """nn.BatchNorm1d over the positions of all examples of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(ROW), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(rows.transpose(1, 2))).mean(2))


@programs.model(batch=sequences)
class RoutedWithACommonThreshold(nn.Module):
    """Positions above the mean score of the rank go through a second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.first = nn.Linear(ROW, 1), nn.Linear(ROW, OUTPUTS)
        self.second = nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        score = self.score(rows)
        gate = torch.sigmoid(score) * (score > score.mean())
        return (self.first(rows) + gate * self.second(rows)).mean(1)


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def embedding_not_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The table of words stays local while the rest is averaged."""
    token_mean(model, shard).backward()
    average(model.hidden, rank)
    average(model.head, rank)


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def labels_not_shifted_on_a_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """On the last rank targets are moved by one position."""
    if rank.rank == rank.world_size - 1:
        shard = shard | {"targets": shard["targets"].roll(1, 1)}
    UnderDdp(token_mean)(model, shard, rank)


def text_mean(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over texts of each text's own mean."""
    scores = model(batch["rows"]).transpose(1, 2)
    each = F.cross_entropy(scores, batch["targets"], reduction="none").sum(1)
    return (each / (batch["targets"] >= 0).sum(1)).mean()


@programs.loss(model=LanguageModel, batch=texts, step=UnderDdp(text_mean))
def mean_of_texts_instead_of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """The step takes the mean of every text; the big batch takes the mean of all tokens."""
    return token_mean(model, batch)


@programs.step(model=LanguageModel, batch=texts, loss=token_mean)
def micro_batches_of_tokens(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Micro-batches with few and with many tokens count equally."""
    ddp = DistributedDataParallel(model)
    window = [{name: leaf[start : start + 2] for name, leaf in shard.items()} for start in (0, 2)]
    sum(token_mean(ddp, each) / 2 for each in window).backward()


def error_of_the_last(model: nn.Module, batch: Batch) -> Tensor:
    """The error at the last position."""
    return F.mse_loss(model(batch["rows"][:, -1]), batch["targets"])


@programs.step(model=lambda: nn.Linear(ROW, OUTPUTS), batch=sequences, loss=error_of_the_last)
def first_position_instead_of_last(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step reads the first position of each sequence, and the big batch the last."""
    mean_squared_error(model, {"rows": shard["rows"][:, 0], "targets": shard["targets"]}).backward()
    average(model, rank)
