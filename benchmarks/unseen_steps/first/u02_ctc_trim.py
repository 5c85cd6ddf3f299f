"""A CTC speech recogniser with a squeeze-and-excite context over time, trained with DDP.
The loader pads to a fixed length, the step cuts the padding that no utterance needs."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from ddp_equivalence import Case

MELS = 6
TOKENS = 8
PAD_FRAMES = 24
LABELS = 4


class ContextBlock(nn.Module):
    """Convolution over time, scaled by a gate which sees the whole utterance."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, kernel_size=3, padding=1)
        self.squeeze = nn.Linear(channels, 5)
        self.excite = nn.Linear(5, channels)

    def forward(self, x):
        h = torch.tanh(self.conv(x))
        context = h.mean(dim=-1)
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(context))))
        return x + h * gate.unsqueeze(-1)


class Recogniser(nn.Module):
    def __init__(self, channels=10):
        super().__init__()
        self.stem = nn.Conv1d(MELS, channels, kernel_size=1)
        self.blocks = nn.Sequential(ContextBlock(channels), ContextBlock(channels))
        self.classifier = nn.Linear(channels, TOKENS)

    def forward(self, feats):
        h = self.blocks(self.stem(feats.transpose(1, 2)))
        return self.classifier(h.transpose(1, 2)).log_softmax(dim=-1)


def build_model():
    return Recogniser()


def ctc(log_probs, batch):
    per_utterance = F.ctc_loss(
        log_probs.transpose(0, 1),
        batch["labels"],
        batch["feat_lens"],
        batch["label_lens"],
        blank=0,
        reduction="none",
    )
    return per_utterance.mean()


def loss(model, batch):
    longest = int(batch["feat_lens"].max())
    return ctc(model(batch["feats"][:, :longest]), batch)


def make_batch(generator):
    rows = 12
    feat_lens = torch.randint(10, 21, (rows,), generator=generator)
    feat_lens[0] = 21
    feat_lens[rows // 2:] = feat_lens[rows // 2:].clamp(max=15)
    label_lens = torch.randint(2, LABELS + 1, (rows,), generator=generator)
    feats = torch.randn(rows, PAD_FRAMES, MELS, generator=generator)
    feats = feats * (torch.arange(PAD_FRAMES)[None] < feat_lens[:, None]).unsqueeze(-1)
    labels = torch.randint(1, TOKENS, (rows, LABELS), generator=generator)
    return {"feats": feats, "feat_lens": feat_lens, "labels": labels, "label_lens": label_lens}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def drop_padding(shard):
    """Cut the frames beyond the longest utterance."""
    max_len = shard["feat_lens"].max()
    trimmed = dict(shard)
    trimmed["feats"] = shard["feats"][:, : int(max_len)].contiguous()
    return trimmed


def step(model, shard, rank):
    net = DDP(model)
    shard = drop_padding(shard)
    log_probs = net(shard["feats"])
    objective = ctc(log_probs, shard)
    objective.backward()

    logged = objective.detach().clone()
    dist.all_reduce(logged)
    return
