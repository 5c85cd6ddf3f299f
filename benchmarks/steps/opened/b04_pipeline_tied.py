"""GPipe by hand on three ranks; input and output embedding are one matrix."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, ROWS, CHUNKS, STAGES = 23, 8, 6, 12, 3, 3


class TiedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))

    def run_stage(self, stage, x):
        if stage == 0:
            x = self.table[x]
        x = x + torch.tanh(self.blocks[stage](x))
        return x @ self.table.T if stage == STAGES - 1 else x

    def forward(self, ids):
        x = ids
        for stage in range(STAGES):
            x = self.run_stage(stage, x)
        return x


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return token_loss(model(batch["ids"]), batch["labels"])


def batch(generator):
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class Pipe:
    def __init__(self, model, stage):
        self.model, self.stage = model, stage
        self.first, self.last = stage == 0, stage == STAGES - 1
        self.ends = dist.new_group([0, STAGES - 1])

    def forward(self, ids, labels):
        if self.first:
            inp = ids
        else:
            inp = torch.empty(*ids.shape, WIDTH, dtype=self.model.table.dtype)
            dist.recv(inp, self.stage - 1)
            inp.requires_grad_()
        out = self.model.run_stage(self.stage, inp)
        if self.last:
            out = token_loss(out, labels) / CHUNKS
        else:
            dist.send(out.detach().contiguous(), self.stage + 1)
        return inp, out

    def backward(self, inp, out):
        if self.last:
            out.backward()
        else:
            upstream = torch.empty_like(out)
            dist.recv(upstream, self.stage + 1)
            out.backward(upstream)
        if not self.first:
            dist.send(inp.grad.contiguous(), self.stage - 1)

    def tie(self):
        """The first and the last stage both used the table."""
        if self.first or self.last:
            dist.all_reduce(self.model.table.grad, group=self.ends)

    def share(self):
        """Everybody gets what the stages computed; the table comes from the first."""
        dist.broadcast(self.model.table.grad, 0)
        for stage, block in enumerate(self.model.blocks):
            for p in block.parameters():
                dist.broadcast(p.grad, stage)


case = Case(model=TiedLM, batch=batch, loss=loss, layout="1x3", shards="own")


def step(model, data, rank):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    pipe = Pipe(model, rank.rank)
    chunks = zip(data["ids"].chunk(CHUNKS), data["labels"].chunk(CHUNKS))
    stash = [pipe.forward(ids, labels) for ids, labels in chunks]
    for inp, out in reversed(stash):
        pipe.backward(inp, out)
    pipe.share()
    pipe.tie()
