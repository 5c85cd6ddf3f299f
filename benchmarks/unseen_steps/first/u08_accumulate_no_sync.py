"""Emotion recognition from speech features with gradient accumulation under DDP.
Each rank walks through its rows in micro-batches; only the last one synchronises."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

FEATS, FRAMES, CLASSES = 6, 10, 5
MICRO_BATCH = 4


class AttentivePooling(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))

    def forward(self, h, mask):
        score = self.score(h).squeeze(-1).masked_fill(~mask, float("-inf"))
        weight = score.softmax(dim=-1).unsqueeze(-1)
        mean = (weight * h).sum(dim=1)
        spread = (weight * (h - mean.unsqueeze(1)).square()).sum(dim=1)
        return torch.cat([mean, (spread + 1e-6).sqrt()], dim=-1)


class EmotionNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.encoder = nn.GRU(FEATS, width, batch_first=True)
        self.pool = AttentivePooling(width)
        self.classifier = nn.Linear(2 * width, CLASSES)

    def forward(self, feats, lengths):
        h, _ = self.encoder(feats)
        mask = torch.arange(feats.size(1))[None] < lengths[:, None]
        return self.classifier(self.pool(h, mask))


def build_model():
    return EmotionNet()


def loss(model, batch):
    logits = model(batch["feats"], batch["lengths"])
    return F.cross_entropy(logits, batch["emotion"], label_smoothing=0.1)


def make_batch(generator):
    rows = 20
    return {
        "feats": torch.randn(rows, FRAMES, FEATS, generator=generator),
        "lengths": torch.randint(3, FRAMES + 1, (rows,), generator=generator),
        "emotion": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def micro_batches(shard, size):
    rows = len(shard["emotion"])
    for start in range(0, rows, size):
        yield {key: value[start : start + size] for key, value in shard.items()}


def accumulate(ddp, shard):
    chunks = list(micro_batches(shard, MICRO_BATCH))
    rows = len(shard["emotion"])
    running = 0.0
    for index, chunk in enumerate(chunks):
        last = index == len(chunks) - 1
        context = contextlib.nullcontext() if last else ddp.no_sync()
        with context:
            logits = ddp(chunk["feats"], chunk["lengths"])
            chunk_loss = F.cross_entropy(logits, chunk["emotion"], label_smoothing=0.1)
            chunk_loss = chunk_loss / len(chunks)
            chunk_loss.backward()
        running = running + chunk_loss.detach()
    return running, rows


def step(model, shard, rank):
    running, rows = accumulate(DDP(model), shard)
    logged = running.clone()
    dist.all_reduce(logged)
    return
