"""A CTC recogniser; lengths come as fractions of the padded batch, as in SpeechBrain recipes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class AsrConfig:
    mels: int = 6
    hidden: int = 12
    vocabulary: int = 7
    max_frames: int = 20
    tokens: int = 3
    blank: int = 0


CONFIG = AsrConfig()
FRAMES = (20, 19, 19, 18, 16, 15, 15, 14, 12, 12, 11, 10)


class Recogniser(nn.Module):
    def __init__(self, config: AsrConfig = CONFIG) -> None:
        super().__init__()
        self.encoder = nn.GRU(config.mels, config.hidden, batch_first=True)
        self.ctc_lin = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, feats):
        return self.ctc_lin(self.encoder(feats)[0]).log_softmax(dim=-1)


def ctc_cost(log_probs, tokens, frame_counts):
    """The negative log likelihood per utterance."""
    token_counts = torch.full((tokens.shape[0],), tokens.shape[1])
    total = F.ctc_loss(
        log_probs.transpose(0, 1),
        tokens,
        frame_counts,
        token_counts,
        blank=CONFIG.blank,
        reduction="sum",
    )
    return total / tokens.shape[0]


def absolute_lengths(relative, max_frames: int) -> torch.Tensor:
    return torch.round(relative * max_frames).long()


def make_batch(generator):
    frames = torch.tensor(FRAMES)
    feats = torch.randn(len(FRAMES), CONFIG.max_frames, CONFIG.mels, generator=generator)
    valid = torch.arange(CONFIG.max_frames) < frames.unsqueeze(1)
    return {
        "feats": feats * valid.unsqueeze(-1),
        "feat_lens": frames / CONFIG.max_frames,
        "tokens": torch.randint(
            1, CONFIG.vocabulary, (len(FRAMES), CONFIG.tokens), generator=generator
        ),
    }


def asr_loss(model, batch):
    frame_counts = absolute_lengths(batch["feat_lens"], CONFIG.max_frames)
    return ctc_cost(model(batch["feats"]), batch["tokens"], frame_counts)


case = Case(model=Recogniser, batch=make_batch, loss=asr_loss, layout="1x3")


class AsrBrain:
    def __init__(self, model: nn.Module, config: AsrConfig = CONFIG) -> None:
        self.modules = DistributedDataParallel(model)
        self.config = config

    def trim(self, feats, relative):
        """Drop the frames that are padding in every utterance at hand."""
        longest = int(absolute_lengths(relative, feats.shape[1]).max())
        return feats[:, :longest]

    def compute_forward(self, batch):
        feats = self.trim(batch["feats"], batch["feat_lens"])
        return self.modules(feats), batch["feat_lens"]

    def compute_objectives(self, predictions, batch):
        log_probs, relative = predictions
        frame_counts = absolute_lengths(relative, log_probs.shape[1])
        return ctc_cost(log_probs, batch["tokens"], frame_counts)

    def fit_batch(self, batch) -> float:
        loss = self.compute_objectives(self.compute_forward(batch), batch)
        loss.backward()
        return loss.item()


def step(model, shard, rank):
    AsrBrain(model).fit_batch(shard)
