"""Two pipeline stages by hand (GPipe), twice: ranks 0 -> 1 and 2 -> 3. Input and output embedding
are the same matrix, which both stages hold."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, STAGES = 17, 8, 6, 2


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.rnn(self.norm(x))[0]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lower, self.upper = Mixer(), Mixer()

    def first(self, tokens):
        return self.lower(self.embedding(tokens))

    def second(self, hidden):
        return F.linear(self.upper(hidden), self.embedding.weight)

    def forward(self, tokens):
        return self.second(self.first(tokens))


def next_token_loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def text(generator):
    return {"tokens": torch.randint(VOCAB, (16, LENGTH), generator=generator)}


case = Case(
    model=LanguageModel,
    batch=text,
    loss=lambda model, b: next_token_loss(model(b["tokens"]), b["tokens"]),
    layout="2x2",
)


class Pipeline:
    def __init__(self, model, rank, micro_batches=2, sum_tied=False):
        self.model, self.micro_batches, self.sum_tied = model, micro_batches, sum_tied
        self.group, _ = dist.new_subgroups(STAGES)
        self.data = [dist.new_group([s, s + STAGES]) for s in range(STAGES)]
        self.stage = rank.rank % STAGES
        self.lowest = rank.rank - self.stage

    def run(self, tokens):
        parts = [torch.empty_like(tokens) for _ in range(STAGES)]
        dist.all_gather(parts, tokens, group=self.group)
        for micro in torch.cat(parts).chunk(self.micro_batches):
            if self.stage == 0:
                hidden = self.model.first(micro)
                dist.send(hidden.detach(), self.lowest + 1)
                grad = torch.empty_like(hidden)
                dist.recv(grad, self.lowest + 1)
                hidden.backward(grad)
            else:
                hidden = next(self.model.parameters()).new_empty(*micro.shape, WIDTH)
                dist.recv(hidden, self.lowest)
                logits = self.model.second(hidden.requires_grad_())
                (next_token_loss(logits, micro) / self.micro_batches).backward()
                dist.send(hidden.grad, self.lowest)

    def stage_of(self, name):
        return 1 if name.startswith("upper") else 0

    def finish(self):
        if self.sum_tied:
            dist.all_reduce(self.model.embedding.weight.grad, group=self.group)
        for name, p in self.model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=self.data[self.stage])
            p.grad /= len(self.data)
            dist.broadcast(p.grad, self.lowest + self.stage_of(name), group=self.group)


def step(model, shard, rank):
    pipeline = Pipeline(model, rank)
    pipeline.run(shard["tokens"])
    pipeline.finish()
