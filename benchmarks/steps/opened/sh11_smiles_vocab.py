"""SMILES language model with one table for reading and for writing tokens; the rows of the table are split over ranks.
All ranks hold the same strings, the body of the network is the same everywhere."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SmilesModel(nn.Module):
    def __init__(self, vocab=12, dim=7, depth=2):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(vocab, dim)
        self.memory = nn.GRU(dim, dim, num_layers=depth, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def body(self, x):
        return self.norm(x + self.memory(x)[0])

    def forward(self, ids):
        return F.linear(self.body(self.table(ids)), self.table.weight)


def loss(model, batch):
    return F.cross_entropy(model(batch["in"]).flatten(0, 1), batch["out"].flatten())


class Rows:
    """The rows [start, stop) of the table, with look-up and cross-entropy over the whole vocabulary."""

    def __init__(self, table, rank, size):
        per = table.shape[0] // size
        self.start, self.stop = rank * per, (rank + 1) * per
        self.weight = table.detach()[self.start:self.stop].clone().requires_grad_(True)

    def local(self, ids):
        elsewhere = (ids < self.start) | (ids >= self.stop)
        return (ids - self.start).masked_fill(elsewhere, 0), elsewhere

    def embed(self, ids):
        index, elsewhere = self.local(ids)
        found = F.embedding(index, self.weight)
        return SumForward.apply(found)

    def cross_entropy(self, h, target):
        logits = F.linear(SumBackward.apply(h), self.weight)
        top = logits.detach().max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top.unsqueeze(-1)
        log_z = SumForward.apply(logits.exp().sum(-1)).log()
        index, elsewhere = self.local(target)
        picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        return (log_z - SumForward.apply(picked)).mean()


def everywhere(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def step(model, shard, rank):
    strings = {k: everywhere(v) for k, v in shard.items()}
    rows = Rows(model.table.weight, rank.rank, rank.world_size)
    h = model.body(rows.embed(strings["in"]))
    rows.cross_entropy(h, strings["out"]).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if not name.startswith("table")}
    grads["table.weight"] = everywhere(rows.weight.grad)
    return grads


def strings(g):
    ids = torch.randint(0, 12, (8, 7), generator=g)
    return {"in": ids[:, :-1].contiguous(), "out": ids[:, 1:].contiguous()}


case = Case(model=SmilesModel, batch=strings, loss=loss, layout="1x2")
