"""Speaker classification from filterbank frames: convolutional encoder and attentive pooling."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

MELS = 5
SPEAKERS = 4
DURATIONS = [12, 7, 11, 9, 12, 8, 6, 5, 7, 6, 4, 7]


def length_mask(lengths, frames):
    return torch.arange(frames)[None, :] < lengths[:, None]


class Collator:
    """Cuts the stored, fully padded features down to the longest utterance at hand."""

    def __init__(self, multiple_of=1):
        self.multiple_of = multiple_of

    def __call__(self, batch):
        longest = int(batch["lengths"].max())
        frames = -(-longest // self.multiple_of) * self.multiple_of
        return {**batch, "features": batch["features"][:, :frames]}


class FrameEncoder(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Conv1d(MELS, channels, 3, padding=1)
        self.outer = nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, features, mask):
        keep = mask.unsqueeze(1)
        x = (features.transpose(1, 2) * keep).contiguous()
        x = F.gelu(self.inner(x)) * keep
        x = F.gelu(self.outer(x)) * keep
        return x.transpose(1, 2)


class AttentivePooling(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(channels, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, frames, mask):
        scores = self.score(frames).squeeze(-1)
        weights = scores.softmax(dim=-1).unsqueeze(-1)
        mean = (weights * frames).sum(dim=1)
        square = (weights * frames.square()).sum(dim=1)
        deviation = (square - mean.square()).clamp(min=1e-6).sqrt()
        return torch.cat([mean, deviation], dim=-1)


class SpeakerNet(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.encoder = FrameEncoder(channels)
        self.pooling = AttentivePooling(channels)
        self.classifier = nn.Linear(2 * channels, SPEAKERS)

    def forward(self, features, lengths):
        mask = length_mask(lengths, features.shape[1])
        frames = self.encoder(features, mask)
        return self.classifier(self.pooling(frames, mask))


def make_batch(generator):
    lengths = torch.tensor(DURATIONS)
    features = torch.randn(len(lengths), max(DURATIONS), MELS, generator=generator)
    features = features * length_mask(lengths, max(DURATIONS)).unsqueeze(-1)
    speakers = torch.randint(SPEAKERS, (len(lengths),), generator=generator)
    return {"features": features, "lengths": lengths, "speakers": speakers}


collate = Collator()


def speaker_loss(model, batch):
    batch = collate(batch)
    logits = model(batch["features"], batch["lengths"])
    return F.cross_entropy(logits, batch["speakers"], label_smoothing=0.1)


class SpeakerTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)

    def fit_batch(self, batch):
        self.ddp.train()
        loss = speaker_loss(self.ddp, batch)
        loss.backward()
        return loss.item()


case = Case(model=SpeakerNet, batch=make_batch, loss=speaker_loss, layout="1x2")


def step(model, shard, rank):
    SpeakerTrainer(model).fit_batch(shard)
