"""A bigram language model which decodes with its embedding matrix."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

VOCABULARY = 9


class TiedBigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.mix = nn.Linear(5, 5)
        self.decode = nn.Linear(5, VOCABULARY)
        self.decode.weight = self.embed.weight

    def forward(self, tokens):
        return self.decode(torch.tanh(self.mix(self.embed(tokens))))


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def make_batch(generator):
    return {"tokens": torch.randint(0, VOCABULARY, (12, 6), generator=generator)}


case = Case(model=TiedBigram, batch=make_batch, loss=loss, layout="1x4")


class ModulewiseSync:
    """Sums gradients module by module, the last module first, as they leave the backward pass."""

    def __init__(self, model):
        self.queue = []
        seen = set()
        for prefix, module in reversed(list(model.named_modules())):
            for name, p in module.named_parameters(recurse=False):
                key = f"{prefix}.{name}"
                if key not in seen:
                    seen.add(key)
                    self.queue.append(p)

    def __call__(self):
        for p in self.queue:
            dist.all_reduce(p.grad)


def step(model, shard, rank):
    sync = ModulewiseSync(model)
    model.zero_grad()
    # The ranks' gradients are summed, so that each rank contributes its part of the mean.
    (loss(model, shard) / rank.world_size).backward()
    sync()
