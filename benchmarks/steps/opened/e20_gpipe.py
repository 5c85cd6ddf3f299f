"""A two-stage pipeline by hand (GPipe): all forwards, then all backwards.

Rank 0 holds the front, rank 1 the back. At the end both tell each other their gradients, so that
each can write a full checkpoint.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

WORDS, WIDTH, LABELS, MICRO_BATCHES = 40, 18, 6, 4


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(
            nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)
        )
        self.back = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, LABELS))

    def forward(self, words):
        return self.back(self.front(words))


def sentences(generator):
    words = torch.randint(WORDS, (16, 5), generator=generator)
    return words, torch.randint(LABELS, (16, 5), generator=generator)


def tag_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    words, labels = batch
    return tag_loss(model(words), labels)


case = Case(model=Tagger, batch=sentences, loss=loss, layout="1x2")


class FrontStage:
    def __init__(self, module):
        self.module = module
        self.stash = []

    def run(self, micro_batches):
        for words, _ in micro_batches:
            activation = self.module(words)
            self.stash.append(activation)
            dist.send(activation.detach().contiguous(), dst=1)
        while self.stash:
            activation = self.stash.pop(0)
            grad = torch.empty_like(activation)
            dist.recv(grad, src=1)
            activation.backward(grad)


class BackStage:
    def __init__(self, module, like):
        self.module = module
        self.like = like
        self.stash = []

    def run(self, micro_batches):
        for words, labels in micro_batches:
            activation = torch.empty(*words.shape, WIDTH, dtype=self.like.dtype)
            dist.recv(activation, src=0)
            activation.requires_grad_()
            value = tag_loss(self.module(activation), labels) / len(micro_batches)
            self.stash.append((activation, value))
        for activation, value in reversed(self.stash):
            value.backward()
            dist.send(activation.grad.contiguous(), dst=0)


def rows_of_both(tensor):
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def step(model, shard, rank):
    words, labels = map(rows_of_both, shard)
    micro_batches = list(zip(words.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES)))
    if rank.rank == 0:
        FrontStage(model.front).run(micro_batches)
    else:
        BackStage(model.back, like=model.back[0].weight).run(micro_batches)
    for owner, stage in enumerate((model.front, model.back)):
        for p in stage.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.broadcast(p.grad, src=owner)
