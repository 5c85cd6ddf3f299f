"""A language model of causal convolutions, split along the sequence.

Every rank has all rows and a third of the positions, with as much of the text before them as the
convolutions see (the halo), so no activations need to be exchanged.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, WIDTH, KERNEL, LAYERS = 33, 14, 4, 2
POSITIONS = 18


class CausalConv(nn.Conv1d):
    def forward(self, x):
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class ConvLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.convs = nn.ModuleList(CausalConv(WIDTH, WIDTH, KERNEL) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        for conv in self.convs:
            x = x + torch.tanh(conv(x))
        return self.head(x.transpose(1, 2))


def texts(generator):
    return torch.randint(VOCAB, (12, POSITIONS + 1), generator=generator)


def nll(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, ids):
    return nll(model(ids[:, :-1]), ids[:, 1:])


case = Case(model=ConvLM, batch=texts, loss=loss, layout="1x3")


def receptive_halo(kernel, layers=1):
    """How many earlier positions an output depends on."""
    return layers * (kernel - 1)


class SequenceParallel:
    def __init__(self, model, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.model = DDP(model)
        self.halo = receptive_halo(KERNEL)

    def rows_of_all(self, ids):
        parts = [torch.empty_like(ids) for _ in range(self.world_size)]
        dist.all_gather(parts, ids)
        return torch.cat(parts)

    def part(self, ids):
        """Inputs with their halo, targets, and how many outputs are of the halo."""
        length = (ids.shape[1] - 1) // self.world_size
        start, end = self.rank * length, (self.rank + 1) * length
        begin = max(0, start - self.halo)
        return ids[:, begin:end], ids[:, start + 1 : end + 1], start - begin

    def backward(self, ids):
        inputs, targets, skip = self.part(self.rows_of_all(ids))
        nll(self.model(inputs)[:, skip:], targets).backward()


def step(model, shard, rank):
    SequenceParallel(model, rank.rank, rank.world_size).backward(shard)
