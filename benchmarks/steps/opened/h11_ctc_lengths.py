"""Speech with CTC. The loss is per character of the transcripts of all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

LETTERS, BLANK, FRAMES, LONGEST, CLIPS = 6, 0, 18, 7, 8


class Clips(NamedTuple):
    audio: Tensor
    frames: Tensor
    text: Tensor
    letters: Tensor


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listen = nn.GRU(4, 8, batch_first=True, bidirectional=True)
        self.spell = nn.Linear(16, LETTERS)

    def forward(self, audio: Tensor) -> Tensor:
        return self.spell(self.listen(audio)[0]).log_softmax(-1).transpose(0, 1)


def negative_log_likelihood(model: nn.Module, clips: Clips) -> Tensor:
    return F.ctc_loss(
        model(clips.audio),
        clips.text,
        clips.frames,
        clips.letters,
        blank=BLANK,
        reduction="sum",
        zero_infinity=True,
    )


class PerLetter:
    """Calls a function that returns a sum, and divides by a length summed over the ranks."""

    def __init__(self, summed, length: str = "frames") -> None:
        self.summed, self.length = summed, length

    def count(self, clips: Clips) -> Tensor:
        number = getattr(clips, self.length).sum()
        dist.all_reduce(number)
        return number

    def __call__(self, model: nn.Module, clips: Clips) -> Tensor:
        return dist.get_world_size() * self.summed(model, clips) / self.count(clips)


def some_clips(generator: torch.Generator) -> tuple[Tensor, ...]:
    return Clips(
        audio=torch.randn(CLIPS, FRAMES, 4, generator=generator),
        frames=torch.randint(15, FRAMES + 1, (CLIPS,), generator=generator),
        text=torch.randint(1, LETTERS, (CLIPS, LONGEST), generator=generator),
        letters=torch.randint(2, LONGEST + 1, (CLIPS,), generator=generator),
    )


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    clips = Clips(*batch)
    return negative_log_likelihood(model, clips) / clips.letters.sum()


case = Case(model=Recognizer, batch=some_clips, loss=loss, layout="1x2")


def step(model: nn.Module, shard: tuple[Tensor, ...], rank) -> None:
    ddp = nn.parallel.DistributedDataParallel(model)
    criterion = PerLetter(negative_log_likelihood)
    criterion(ddp, Clips(*shard)).backward()
