"""Speech commands: features of padded utterances are normalised over all valid frames."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

BANDS, FRAMES, COMMANDS = 6, 15, 4


class FrameNorm(nn.Module):
    """Batch normalisation which leaves padding out, over this process or over all of them."""

    def __init__(self, features):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))
        self.across_ranks = False

    def total(self, x):
        return dist_fn.all_reduce(x) if self.across_ranks else x

    def forward(self, x, valid):
        valid = valid[..., None].to(x.dtype)
        frames, total = valid.sum((0, 1)), (x * valid).sum((0, 1))
        squares = ((x - total / frames) ** 2 * valid).sum((0, 1))
        frames, total, squares = self.total(frames), self.total(total), self.total(squares)
        mean, var = total / frames, squares / frames
        return ((x - mean) / (var + 1e-3).sqrt() * self.gain + self.shift) * valid


class Commands(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(BANDS, 10)
        self.norm = FrameNorm(10)
        self.second = nn.Linear(10, COMMANDS)

    def forward(self, sound, lengths):
        valid = torch.arange(sound.shape[1], device=sound.device) < lengths[:, None]
        hidden = self.norm(self.first(sound), valid).relu()
        return self.second(hidden.sum(1) / lengths[:, None])


def utterances(generator):
    loudness = torch.linspace(-1.5, 1.5, 12)[:, None, None]
    return {
        "sound": torch.randn(12, FRAMES, BANDS, generator=generator) + loudness,
        "lengths": torch.randint(5, FRAMES + 1, (12,), generator=generator),
        "command": torch.randint(0, COMMANDS, (12,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["sound"], batch["lengths"]), batch["command"])


def step(model, shard, rank):
    for module in model.modules():
        if isinstance(module, FrameNorm):
            module.across_ranks = True
    ddp = DDP(model)
    loss(ddp, shard).backward()


case = Case(model=Commands, batch=utterances, loss=loss, layout="1x2")
