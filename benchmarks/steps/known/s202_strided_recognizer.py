"""Speech recognition with CTC. Utterances of similar length share a bucket, so little is padded.

The encoder halves the frame rate. Gradients of the buckets are accumulated.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

LETTERS, STRIDE = 5, 2


@dataclass
class Utterances:
    frames: Tensor
    frame_counts: Tensor
    letters: Tensor
    letter_counts: Tensor


class Recognizer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(4, width, 3, stride=STRIDE, padding=1)
        self.mix = nn.Linear(width, width)
        self.letters = nn.Linear(width, LETTERS + 1)

    def forward(self, frames: Tensor) -> Tensor:
        states = torch.tanh(self.subsample(frames.mT)).mT
        return self.letters(torch.tanh(self.mix(states))).log_softmax(-1)


def encoded_counts(frame_counts: Tensor) -> Tensor:
    return (frame_counts - 1) // STRIDE + 1


def loss(model: nn.Module, batch: Utterances) -> Tensor:
    log_probs = model(batch.frames).transpose(0, 1)
    counts = encoded_counts(batch.frame_counts)
    return F.ctc_loss(log_probs, batch.letters, counts, batch.letter_counts)


def make_batch(generator: torch.Generator) -> Utterances:
    frame_counts = torch.tensor([17, 20, 13, 19, 14, 20, 16, 15])
    silence = torch.arange(20) >= frame_counts[:, None]
    frames = torch.randn(8, 20, 4, generator=generator)
    return Utterances(
        frames=frames.masked_fill(silence[..., None], 0.0),
        frame_counts=frame_counts,
        letters=torch.randint(1, LETTERS + 1, (8, 4), generator=generator),
        letter_counts=torch.tensor([3, 4, 2, 4, 2, 3, 3, 2]),
    )


case = Case(model=Recognizer, batch=make_batch, loss=loss, layout="1x2")


def buckets(batch: Utterances, size: int = 2) -> Iterator[Utterances]:
    """The shortest utterances come first; every bucket ends where its longest one ends."""
    for rows in batch.frame_counts.argsort(stable=True).split(size):
        longest = int(batch.frame_counts[rows].max())
        yield Utterances(
            frames=batch.frames[rows, :longest],
            frame_counts=batch.frame_counts[rows] // STRIDE,
            letters=batch.letters[rows],
            letter_counts=batch.letter_counts[rows],
        )


def bucket_loss(model: nn.Module, bucket: Utterances) -> Tensor:
    log_probs = model(bucket.frames).transpose(0, 1)
    return F.ctc_loss(log_probs, bucket.letters, bucket.frame_counts, bucket.letter_counts)


def step(model: nn.Module, shard: Utterances, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    pieces = list(buckets(shard))
    for index, bucket in enumerate(pieces, start=1):
        with nullcontext() if index == len(pieces) else ddp.no_sync():
            (bucket_loss(ddp, bucket) / len(pieces)).backward()
