"""Next-token training of a small residual network with fully_shard, one group per block.

The sequences are padded, so the loss is the mean over all real tokens of the global batch.
FSDP's own averaging is turned off and the division by the number of tokens happens in the loss.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

PAD = -100


@dataclass
class Config:
    vocab: int = 29
    width: int = 12
    blocks: int = 3
    length: int = 10
    sequences: int = 8


CONFIG = Config()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, states):
        return states + self.down(F.gelu(self.up(self.norm(states))))


class Network(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens):
        states = self.tokens(tokens)
        for block in self.blocks:
            states = block(states)
        return self.head(self.norm(states))


def sequences(generator):
    shape = (CONFIG.sequences, CONFIG.length)
    tokens = torch.randint(0, CONFIG.vocab, shape, generator=generator)
    labels = torch.randint(0, CONFIG.vocab, shape, generator=generator)
    lengths = torch.randint(2, CONFIG.length + 1, (CONFIG.sequences, 1), generator=generator)
    labels = labels.masked_fill(torch.arange(CONFIG.length) >= lengths, PAD)
    return {"tokens": tokens, "labels": labels}


def summed(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PAD, reduction="sum"
    )


def loss(model, batch):
    return summed(model, batch) / (batch["labels"] != PAD).sum()


def apply_fsdp(model, reshard_after_forward=True):
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    # The loss is divided by the global number of tokens: gradients only need to be summed.
    model.set_gradient_divide_factor(1.0)
    return model


def step(model, shard, rank):
    apply_fsdp(model)
    real = (shard["labels"] != PAD).sum()
    dist.all_reduce(real)
    (summed(model, shard) / real).backward()


case = Case(model=lambda: Network(CONFIG), batch=sequences, loss=loss, layout="1x2")
