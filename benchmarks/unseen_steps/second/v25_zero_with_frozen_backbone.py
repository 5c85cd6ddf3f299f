"""Fine-tuning with a frozen embedding; gradients are reduced to their owner (ZeRO-2)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, LENGTH, CLASSES, EXAMPLES = 20, 6, 4, 3, 16


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.words.requires_grad_(False)
        self.mix = nn.Linear(LENGTH * WIDTH, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, tokens):
        x = self.words(tokens).flatten(1)
        return self.head(self.norm(torch.relu(self.mix(x))))


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["tags"])


def make_batch(generator):
    return {
        "tokens": torch.randint(WORDS, (EXAMPLES, LENGTH), generator=generator),
        "tags": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")


class ShardedGradients:
    """Round-robin ownership: the owner of a parameter gets the mean of its gradients.

    `collect` hands the owners' results back to all ranks, for logging and for optimizers that
    are not sharded.
    """

    def __init__(self, module):
        self.module = module
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def owner(self, index):
        return index % self.world_size

    def trainable(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def reduce(self):
        for index, parameter in enumerate(self.trainable()):
            mean = parameter.grad / self.world_size
            dist.reduce(mean, dst=self.owner(index))
            if self.owner(index) == self.rank:
                parameter.grad.copy_(mean)

    def collect(self):
        for index, parameter in enumerate(self.module.parameters()):
            if parameter.grad is not None:
                dist.broadcast(parameter.grad, src=self.owner(index))


def step(model, shard, rank):
    gradients = ShardedGradients(model)
    loss(model, shard).backward()
    gradients.reduce()
    gradients.collect()
