"""Sequence trainer with ready-made batches: ranks that run out of batches get a dummy one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

VOCAB, PAD = 9, 0


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, 6)
        self.output_projection = nn.Linear(6, VOCAB)

    def forward(self, tokens):
        return self.output_projection(torch.tanh(self.embed_tokens(tokens)))


def summed_nll(model, sample):
    logits = model(sample["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, sample["target"].flatten(), ignore_index=PAD, reduction="sum")


def loss(model, batch):
    return summed_nll(model, batch) / (batch["target"] != PAD).sum()


def make_batch(generator):
    tokens = torch.randint(1, VOCAB, (10, 6), generator=generator)
    target = torch.randint(1, VOCAB, (10, 6), generator=generator)
    lengths = torch.randint(2, 7, (10, 1), generator=generator)
    return {"tokens": tokens, "target": target.masked_fill(torch.arange(6) >= lengths, PAD)}


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2", shards="own")


def sharded_batches(data, max_sentences, rank, world_size):
    starts = range(0, len(data["tokens"]), max_sentences)
    batches = [{k: v[i : i + max_sentences] for k, v in data.items()} for i in starts]
    mine = batches[rank::world_size]
    longest = -(-len(batches) // world_size)
    return mine + [{}] * (longest - len(mine)), batches[0]


class Trainer:
    def __init__(self, model, dummy_batch):
        self.model = model
        self._dummy_batch = dummy_batch

    def _prepare_sample(self, sample):
        if len(sample) == 0:
            return self._dummy_batch, True
        return sample, False

    def _forward_backward(self, sample, ignore_grad):
        total = summed_nll(self.model, sample)
        if ignore_grad:
            total = total * 0
        total.backward()
        return (sample["target"] != PAD).sum()

    def train_step(self, samples):
        self.model.zero_grad()
        sample_size = torch.zeros((), dtype=torch.long, device=self._dummy_batch["tokens"].device)
        for sample in samples:
            sample, is_dummy_batch = self._prepare_sample(sample)
            sample_size_i = self._forward_backward(sample, ignore_grad=is_dummy_batch)
            sample_size += sample_size_i
        dist.all_reduce(sample_size)
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(sample_size)  # the criterion sums


def step(model, shard, rank):
    samples, dummy = sharded_batches(shard, 2, rank.rank, rank.world_size)
    Trainer(model, dummy).train_step(samples)
