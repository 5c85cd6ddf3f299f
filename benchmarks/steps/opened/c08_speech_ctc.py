"""CTC on padded filterbanks. Lengths are fractions of the padded length, as in our data recipe."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

FRAMES, MELS, SYMBOLS, ROWS, TARGETS = 24, 5, 8, 6, 3


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(MELS, 16, kernel_size=3, padding=1)
        self.proj = nn.Linear(16, SYMBOLS)

    def forward(self, feats):
        hidden = torch.relu(self.conv(feats.transpose(1, 2))).transpose(1, 2)
        return self.proj(hidden).log_softmax(-1)


def utterances(generator):
    frames = torch.tensor([24, 21, 19, 17, 16, 14])  # longest first, from the bucket sampler
    feats = torch.randn(ROWS, FRAMES, MELS, generator=generator)
    feats *= (torch.arange(FRAMES) < frames[:, None])[..., None]
    return {
        "feats": feats,
        "feat_lens": frames / FRAMES,
        "tokens": torch.randint(1, SYMBOLS, (ROWS, TARGETS), generator=generator),
        "token_lens": torch.randint(1, TARGETS + 1, (ROWS,), generator=generator),
    }


def absolute(fractions, longest):
    return (fractions * longest).round().long()


def ctc(log_probs, input_lengths, batch):
    return F.ctc_loss(
        log_probs.transpose(0, 1),
        batch["tokens"],
        input_lengths,
        batch["token_lens"],
        blank=0,
        reduction="sum",
    ) / len(log_probs)


def loss(model, batch):
    lengths = absolute(batch["feat_lens"], batch["feats"].shape[1])
    return ctc(model(batch["feats"]), lengths, batch)


case = Case(model=Acoustic, batch=utterances, loss=loss, layout="1x2")


class Brain:
    def __init__(self, model):
        self.modules = DDP(model)

    def trim(self, batch):
        feats = batch["feats"]
        longest = int(absolute(batch["feat_lens"], feats.shape[1]).max())
        return {**batch, "feats": feats[:, :longest]}

    def compute_forward(self, batch):
        return self.modules(batch["feats"])

    def compute_objectives(self, log_probs, batch):
        lengths = absolute(batch["feat_lens"], log_probs.shape[1])
        return ctc(log_probs, lengths, batch)

    def fit_batch(self, batch):
        batch = self.trim(batch)  # a rank with short utterances saves time
        log_probs = self.compute_forward(batch)
        self.compute_objectives(log_probs, batch).backward()


def step(model, shard, rank):
    Brain(model).fit_batch(shard)
