"""Speech recognition with CTC. Utterances are packed, so they are sorted by length first."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ddp_equivalence import Case, Rank

LETTERS = 6


@dataclass
class Utterances:
    """``frames`` (utterances, time, 4) and ``letters`` (utterances, n), padded to the longest."""

    frames: Tensor
    frame_counts: Tensor
    letters: Tensor
    letter_counts: Tensor


class Recognizer(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, width, batch_first=True)
        self.letters = nn.Linear(width, LETTERS + 1)

    def forward(self, frames: Tensor, counts: Tensor) -> Tensor:
        packed = pack_padded_sequence(frames, counts.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.letters(states).log_softmax(-1)


def loss(model: nn.Module, batch: Utterances) -> Tensor:
    log_probs = model(batch.frames, batch.frame_counts).transpose(0, 1)
    return F.ctc_loss(log_probs, batch.letters, batch.frame_counts, batch.letter_counts)


def make_batch(generator: torch.Generator) -> Utterances:
    return Utterances(
        frames=torch.randn(8, 14, 4, generator=generator),
        frame_counts=torch.tensor([14, 11, 14, 12, 10, 14, 13, 14]),
        letters=torch.randint(1, LETTERS + 1, (8, 5), generator=generator),
        letter_counts=torch.tensor([4, 2, 5, 3, 2, 5, 3, 4]),
    )


case = Case(model=Recognizer, batch=make_batch, loss=loss, layout="1x2")


def sorted_by_length(batch: Utterances) -> Utterances:
    """The longest utterance comes first."""
    order = batch.frame_counts.argsort(descending=True, stable=True)
    return Utterances(
        frames=batch.frames[order],
        frame_counts=batch.frame_counts[order],
        letters=batch.letters[order],
        letter_counts=batch.letter_counts,
    )


def trimmed(batch: Utterances) -> Utterances:
    """Without the frames and letters that are padding in all utterances."""
    frames = batch.frames[:, : int(batch.frame_counts.max())]
    letters = batch.letters[:, : int(batch.letter_counts.max())]
    return Utterances(frames, batch.frame_counts, letters, batch.letter_counts)


def step(model: nn.Module, shard: Utterances, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    optimizer.zero_grad()
    loss(ddp, trimmed(sorted_by_length(shard))).backward()
    optimizer.step()
