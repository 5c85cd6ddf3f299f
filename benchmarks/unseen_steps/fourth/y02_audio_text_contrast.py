"""Contrastive pretraining of an audio and a text encoder, with the candidates of all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLIPS, FRAMES, MELS, TOKENS, VOCABULARY, EMBEDDING = 16, 12, 10, 6, 20, 8


class AudioTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(MELS, 12, kernel_size=3, stride=2)
        self.projection = nn.Linear(12, EMBEDDING)

    def forward(self, mel: Tensor) -> Tensor:
        hidden = F.gelu(self.convolution(mel)).mean(dim=-1)
        return F.normalize(self.projection(hidden), dim=-1)


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 12)
        self.projection = nn.Linear(12, EMBEDDING)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.projection(self.words(tokens).mean(dim=1)), dim=-1)


class CLAP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.audio = AudioTower()
        self.text = TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, mel: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.audio(mel), self.text(tokens), self.logit_scale.exp()


class ContrastiveLoss(nn.Module):
    """Rows are the clips (and captions) of this rank, columns those of the whole batch."""

    def __init__(self, cache_labels: bool = True) -> None:
        super().__init__()
        self.cache_labels = cache_labels
        self.labels: dict[int, Tensor] = {}

    def gather(self, features: Tensor) -> Tensor:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return features
        return torch.cat(dist_fn.all_gather(features.contiguous()))

    def ground_truth(self, rows: int, device: torch.device) -> Tensor:
        """The column in which every row finds its partner."""
        if rows in self.labels:
            return self.labels[rows]
        labels = torch.arange(rows, device=device)
        if self.cache_labels:
            self.labels[rows] = labels
        return labels

    def forward(self, audio: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        audio_to_text = scale * audio @ self.gather(text).T
        text_to_audio = scale * text @ self.gather(audio).T
        labels = self.ground_truth(len(audio), audio.device)
        return (F.cross_entropy(audio_to_text, labels) + F.cross_entropy(text_to_audio, labels)) / 2


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    audio, text, scale = model(batch["mel"], batch["tokens"])
    labels = torch.arange(len(audio), device=audio.device)
    logits = scale * audio @ text.T
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "mel": torch.randn(CLIPS, MELS, FRAMES, generator=generator),
        "tokens": torch.randint(VOCABULARY, (CLIPS, TOKENS), generator=generator),
    }


case = Case(model=CLAP, batch=make_batch, loss=loss, layout="1x4")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    criterion = ContrastiveLoss()
    criterion(*ddp(shard["mel"], shard["tokens"])).backward()
