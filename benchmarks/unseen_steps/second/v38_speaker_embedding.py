"""Speaker classification: frames are normalised per utterance, encoded, and pooled over time."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

UTTERANCES, FRAMES, MELS, SPEAKERS = 16, 20, 6, 5


def frame_mask(lengths, frames):
    return torch.arange(frames)[None, :] < lengths[:, None]


class StatisticsPooling(nn.Module):
    """The mean and the deviation over time, as in x-vectors."""

    def forward(self, x, mask):
        mask = mask.unsqueeze(-1).to(x.dtype)
        count = mask.sum(dim=1)
        mean = (x * mask).sum(dim=1) / count
        variance = ((x - mean.unsqueeze(1)).square() * mask).mean(dim=1)
        return torch.cat([mean, (variance + 1e-5).sqrt()], dim=-1)


class SpeakerNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv = nn.Conv1d(MELS, width, kernel_size=3, padding=1)
        self.dense = nn.Linear(width, width)
        self.pool = StatisticsPooling()
        self.classifier = nn.Linear(2 * width, SPEAKERS)

    def forward(self, features, lengths):
        mask = frame_mask(lengths, features.size(1))
        x = self.conv(features.transpose(1, 2)).transpose(1, 2)
        x = self.dense(torch.relu(x))
        return self.classifier(self.pool(x, mask))


def normalise(features, lengths):
    """Subtracts each utterance's mean spectrum; frames after its end are zero."""
    mask = frame_mask(lengths, features.size(1)).unsqueeze(-1).to(features.dtype)
    mean = (features * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    return (features - mean) * mask


def loss(model, batch):
    features = normalise(batch["features"], batch["lengths"])
    return F.cross_entropy(model(features, batch["lengths"]), batch["speakers"])


def make_batch(generator):
    lengths = torch.randint(6, FRAMES + 1, (UTTERANCES,), generator=generator)
    lengths = lengths.sort().values
    lengths[-1] = FRAMES
    return {
        "features": torch.randn(UTTERANCES, FRAMES, MELS, generator=generator),
        "lengths": lengths,
        "speakers": torch.randint(SPEAKERS, (UTTERANCES,), generator=generator),
    }


case = Case(model=SpeakerNet, batch=make_batch, loss=loss, layout="1x2", shards="10+6")


def trim(batch):
    """Nothing is computed for frames that lie after the longest utterance of this rank."""
    longest = int(batch["lengths"].max())
    return {**batch, "features": batch["features"][:, :longest]}


class SpeechTrainer:
    def __init__(self, model, world_size):
        self.ddp = DistributedDataParallel(model)
        self.world_size = world_size

    def share(self, batch):
        """What this rank's mean has to be multiplied by, since ranks have unequal batches."""
        count = torch.tensor(len(batch["lengths"]))
        total = count.clone()
        dist.all_reduce(total)
        return self.world_size * count / total

    def train_step(self, batch):
        (self.share(batch) * loss(self.ddp, trim(batch))).backward()


def step(model, shard, rank):
    SpeechTrainer(model, rank.world_size).train_step(shard)
