"""Preference optimisation without a reference model: DDP with activation checkpointing.

Chosen and rejected answers are two forward passes and one backward pass.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, PAIRS = 19, 12, 8, 8
BETA, MARGIN = 2.0, 0.5


class Mixer(nn.Module):
    """Causal mixing of the tokens, which may only look at real ones."""

    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, states, mask):
        scores = self.query(states) @ self.key(states).transpose(1, 2) / states.shape[-1] ** 0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~(causal & mask[:, None, :]), -1e4)
        return states + self.output(torch.tanh(scores.softmax(-1) @ self.value(states)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.ModuleList(Mixer(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.checkpointing = False

    def run(self, mixer, states):
        if self.checkpointing:
            return checkpoint(lambda x: mixer(x, self.mask), states, use_reentrant=False)
        return mixer(states, self.mask)

    def forward(self, tokens, mask):
        self.mask = mask
        states = self.embed(tokens)
        for mixer in self.mixers:
            states = self.run(mixer, states)
        logits = self.head(states[:, :-1]).log_softmax(-1)
        picked = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
        real = mask[:, 1:]
        return (picked * real).sum(1) / real.sum(1)


def pairs(generator):
    def answers():
        # Left-padded, as the prompts of a batch are.
        padding = torch.randint(0, LENGTH - 3, (PAIRS, 1), generator=generator)
        return {
            "tokens": torch.randint(0, VOCAB, (PAIRS, LENGTH), generator=generator),
            "mask": torch.arange(LENGTH) >= padding,
        }

    return {
        f"{kind}_{name}": values
        for kind in ("chosen", "rejected")
        for name, values in answers().items()
    }


def loss(model, batch):
    chosen = model(batch["chosen_tokens"], batch["chosen_mask"])
    rejected = model(batch["rejected_tokens"], batch["rejected_mask"])
    return -F.logsigmoid(BETA * (chosen - rejected) - MARGIN).mean()


def step(model, shard, rank):
    model.checkpointing = True
    ddp = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    loss(ddp, shard).backward()


case = Case(model=Policy, batch=pairs, loss=loss, layout="1x2")
