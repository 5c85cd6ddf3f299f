"""Distils a teacher into a small language model: cross entropy plus KL at a temperature."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, LENGTH, T, ALPHA, PAD = 11, 6, 2.0, 0.4, -1


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.rnn = nn.GRU(8, 10, batch_first=True)
        self.out = nn.Linear(10, VOCAB)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def make_batch(generator):
    n = 16
    tokens = torch.randint(0, VOCAB, (n, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (n, 1), generator=generator)
    targets = torch.randint(0, VOCAB, (n, LENGTH), generator=generator)
    targets[torch.arange(LENGTH)[None] >= lengths] = PAD
    teacher = torch.randn(n, LENGTH, VOCAB, generator=generator)
    return {"tokens": tokens, "targets": targets, "teacher": teacher}


def terms(model, batch):
    """The summed cross entropy and the summed divergence, over tokens that are not padding."""
    logits = model(batch["tokens"])
    ce = F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=PAD, reduction="sum"
    )
    student = F.log_softmax(logits / T, dim=-1)
    teacher = F.log_softmax(batch["teacher"] / T, dim=-1)
    kl = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    kl = kl.masked_fill(batch["targets"] == PAD, 0.0).sum()
    return ce, kl * T * T


def mixed(ce, kl, tokens):
    return (1 - ALPHA) * ce / tokens + ALPHA * kl / tokens


def loss(model, batch):
    ce, kl = terms(model, batch)
    return mixed(ce, kl, (batch["targets"] != PAD).sum())


class Distiller:
    def __init__(self, student):
        self.student = DDP(student)

    def count(self, shard):
        tokens = (shard["targets"] != PAD).sum().to(torch.float64)
        dist.all_reduce(tokens)
        return tokens / dist.get_world_size()

    def fit(self, shard):
        tokens = self.count(shard)
        ce, kl = terms(self.student, shard)
        kl = kl / tokens
        ce = ce / (shard["targets"] != PAD).sum()
        objective = (1 - ALPHA) * ce + ALPHA * kl
        objective.backward()


def step(model, shard, rank):
    Distiller(model).fit(shard)


case = Case(model=Student, batch=make_batch, loss=loss)
