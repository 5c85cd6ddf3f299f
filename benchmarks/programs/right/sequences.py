"""Recurrent layers, attention and transformers whose examples do not meet."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.programs.common import (
    HIDDEN,
    LENGTH,
    OUTPUTS,
    ROW,
    TOKENS,
    ByHand,
    LanguageModel,
    UnderDdp,
    mean_squared_error,
    sequences,
    texts,
    token_sum,
    words,
)
from benchmarks.programs.program import Programs

programs = Programs("sequences", right=True)


class Recurrent(nn.Module):
    """A recurrent layer, and a linear layer on its last output."""

    kind: type[nn.RNNBase] = nn.RNN

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = self.kind(ROW, HIDDEN, batch_first=True), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.layer(rows)[0][:, -1])


@programs.model(batch=sequences)
class PlainRnn(Recurrent):
    """nn.RNN over sequences of equal length."""


@programs.model(batch=sequences)
class Lstm(Recurrent):
    """nn.LSTM over sequences of equal length."""

    kind = nn.LSTM


@programs.model(batch=sequences)
class Gru(Recurrent):
    """nn.GRU over sequences of equal length."""

    kind = nn.GRU


@programs.model(batch=sequences, step=ByHand(mean_squared_error))
class TwoDirectionsAndTwoLayers(nn.Module):
    """A bidirectional nn.LSTM with two layers and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(
            ROW, HIDDEN, num_layers=2, bidirectional=True, proj_size=3, batch_first=True
        )
        self.last = nn.Linear(6, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.layer(rows)[0].mean(1))


@programs.model(batch=sequences)
class LstmCellInALoop(nn.Module):
    """nn.LSTMCell is called once for each position; the state starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        state = None
        for position in rows.unbind(1):
            state = self.cell(position, state)
        return self.last(state[0])


@programs.model(batch=sequences)
class LearntInitialState(nn.Module):
    """The first state of the nn.GRU is a parameter, which all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(ROW, HIDDEN, batch_first=True), nn.Linear(HIDDEN, OUTPUTS)
        self.start = nn.Parameter(torch.randn(1, 1, HIDDEN))

    def forward(self, rows: Tensor) -> Tensor:
        state = self.start.expand(1, len(rows), HIDDEN).contiguous()
        return self.last(self.layer(rows, state)[0][:, -1])


@programs.model(batch=words)
class PackedSequences(nn.Module):
    """Texts of different lengths are packed, and sorted on each rank by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, HIDDEN)
        self.layer, self.last = nn.LSTM(HIDDEN, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = 1 + (tokens[:, 0] % LENGTH)
        packed = pack_padded_sequence(
            self.table(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        outputs, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.last(outputs.sum(1) / lengths[:, None])


@programs.model(batch=sequences)
class SelfAttention(nn.Module):
    """nn.MultiheadAttention with batch_first, so that positions attend to their own sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 8), nn.Linear(8, OUTPUTS)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        return self.last(self.attention(hidden, hidden, hidden)[0].mean(1))


@programs.model(batch=words)
class AttentionWithPaddingMask(nn.Module):
    """The first token says how long the text is; the positions after that are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(TOKENS, 8), nn.Linear(8, OUTPUTS)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        padding = torch.arange(LENGTH) > tokens[:, :1] % LENGTH
        mixed = self.attention(hidden, hidden, hidden, key_padding_mask=padding)[0]
        kept = mixed.masked_fill(padding[..., None], 0)
        return self.last(kept.sum(1) / (~padding).sum(1, keepdim=True))


@programs.model(batch=sequences)
class CrossAttentionToLearntQueries(nn.Module):
    """Two learnt queries read the sequence; keys and values have other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.last = nn.Parameter(torch.randn(1, 2, 8)), nn.Linear(16, OUTPUTS)
        self.attention = nn.MultiheadAttention(8, 2, kdim=ROW, vdim=ROW, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        queries = self.queries.expand(len(rows), 2, 8)
        return self.last(self.attention(queries, rows, rows)[0].flatten(1))


@programs.model(batch=sequences)
class TransformerEncoder(nn.Module):
    """nn.TransformerEncoderLayer, normalised first, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 8), nn.Linear(8, OUTPUTS)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.layer(self.first(rows)).mean(1))


@programs.model(batch=sequences)
class TransformerDecoder(nn.Module):
    """nn.TransformerDecoderLayer with a causal mask reads the sequence as its memory, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROW, 8), nn.Linear(8, OUTPUTS)
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH).to(rows.dtype)
        return self.last(self.layer(hidden, hidden, tgt_mask=mask)[:, -1])


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The cross entropy of every token after the first: equally many in every text."""
    scores = model(batch["rows"][:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), batch["rows"][:, 1:].flatten())


@programs.model(batch=words, loss=next_token_loss)
class CausalLanguageModel(nn.Module):
    """A decoder with learnt positions, causal attention and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(TOKENS, 8), nn.Embedding(LENGTH, 8)
        self.mix, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.head = nn.Linear(8, TOKENS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.positions.weight[: tokens.shape[1]]
        query, key, value = self.mix(self.norm(hidden)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(hidden + mixed)


def summed_over_three_ranks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Three times the sum of the rank's tokens, which DDP's mean over three ranks undoes."""
    return 3 * token_sum(model, batch)


@programs.model(batch=texts, loss=token_sum, step=UnderDdp(summed_over_three_ranks), layout="1x3")
class PaddedTextsInASum(LanguageModel):
    """The loss sums over tokens, so that padding counts nothing and ranks need no common count."""


@programs.model(batch=sequences)
class RotaryPositions(nn.Module):
    """Queries and keys are rotated by their position before they meet."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(ROW, 12), nn.Linear(4, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        query, key, value = self.mix(rows).chunk(3, dim=-1)
        angle = torch.arange(LENGTH, dtype=rows.dtype)[:, None] * torch.tensor([1.0, 0.1])
        mixed = F.scaled_dot_product_attention(rotated(query, angle), rotated(key, angle), value)
        return self.last(mixed.mean(1))


def rotated(values: Tensor, angle: Tensor) -> Tensor:
    """Rotate each pair of numbers by the angle of its position."""
    even, odd = values.chunk(2, dim=-1)
    return torch.cat(
        [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1
    )


@programs.model(batch=sequences)
class StateSpaceScan(nn.Module):
    """A linear recurrence with a learnt decay, computed for all positions at once."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.last = nn.Parameter(torch.rand(ROW)), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        ages = torch.arange(LENGTH - 1, -1, -1, dtype=rows.dtype)[:, None]
        return self.last((rows * torch.sigmoid(self.decay) ** ages).sum(1))


@programs.model(batch=sequences)
class TruncatedBackpropagation(Recurrent):
    """The state is detached in the middle of the sequence, in the big batch as well."""

    def forward(self, rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, dim=1)
        _, state = self.layer(first)
        return self.last(self.layer(second, state.detach())[0][:, -1])
