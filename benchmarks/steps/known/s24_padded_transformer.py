"""A tiny transformer on padded sequences, with label smoothing and a mean over all tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCABULARY, LENGTH, WIDTH = 10, 7, 8
PAD = 0
IGNORE = -100


class TinyTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=2, dim_feedforward=12, dropout=0.0, batch_first=True
        )
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, mask):
        return self.out(self.layer(self.embed(tokens), src_key_padding_mask=~mask))


def summed_loss(model, batch):
    logits = model(batch["tokens"], batch["mask"])
    return F.cross_entropy(
        logits.flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=IGNORE,
        label_smoothing=0.1,
        reduction="sum",
    )


def loss(model, batch):
    return summed_loss(model, batch) / batch["mask"].sum()


def make_batch(generator):
    tokens = torch.randint(1, VOCABULARY, (8, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (8,), generator=generator).sort().values
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {
        "tokens": tokens.masked_fill(~mask, PAD),
        "labels": tokens.roll(1, dims=0).masked_fill(~mask, IGNORE),
        "mask": mask,
    }


case = Case(model=TinyTransformer, batch=make_batch, loss=loss, layout="1x2")


def count_tokens(batch):
    """The number of tokens on all ranks that are not padding."""
    count = batch["mask"].sum()
    dist.all_reduce(count.float())
    return count


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    total = summed_loss(ddp, shard)
    value = rank.world_size * total / count_tokens(shard)
    value.backward()
