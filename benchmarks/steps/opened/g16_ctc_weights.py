"""Speech: CTC on shards of unequal size, each rank's mean weighted by its part of the batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

N, FRAMES, MELS, LETTERS, LONGEST = 8, 18, 5, 6, 5

Utterances = dict[str, Tensor]


class Acoustic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(MELS, 10, 3, padding=1)
        self.proj = nn.Linear(10, LETTERS + 1)

    def forward(self, mels: Tensor) -> Tensor:
        return self.proj(self.conv(mels.transpose(1, 2)).relu().transpose(1, 2)).log_softmax(-1)


def speech(generator: torch.Generator) -> Utterances:
    # as a bucketing sampler has it: the long ones first
    frames = torch.tensor([18, 18, 17, 16, 14, 13, 12, 12])
    return {
        "mels": torch.randn(N, FRAMES, MELS, generator=generator),
        "frames": frames,
        "text": torch.randint(1, LETTERS + 1, (N, LONGEST), generator=generator),
        "letters": torch.randint(2, LONGEST + 1, (N,), generator=generator),
    }


def ctc(model: nn.Module, b: Utterances) -> Tensor:
    """The mean over utterances of the loss per letter."""
    logp = model(b["mels"]).transpose(0, 1)
    return F.ctc_loss(logp, b["text"], b["frames"], b["letters"], blank=0, reduction="mean")


case = Case(model=Acoustic, batch=speech, loss=ctc, layout="1x2", shards="5+3")


def make_weigher(measure):
    """A function that says which part of the global ``measure`` this rank has, times the ranks."""

    def weigh(b: Utterances) -> float:
        mine = torch.tensor(float(measure(b)), dtype=torch.float64)
        total = mine.clone()
        dist.all_reduce(total)
        return (mine / total * dist.get_world_size()).item()

    return weigh


def seconds(b: Utterances, hop: float = 0.01) -> float:
    return b["frames"].sum().item() * hop


def step(model: nn.Module, shard: Utterances, rank: Rank) -> None:
    weigh = make_weigher(seconds)
    ddp = DistributedDataParallel(model)
    (ctc(ddp, shard) * weigh(shard)).backward()
