"""Sequence parallelism for a gated causal mixer on nucleotide reads: norms and embeddings work on a slice of the
sequence, the wide projections on a slice of the channels. One tensor-parallel group, every rank sees all reads."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


def whole(t, dim=0):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, dim=dim)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return whole(x, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return whole(grad, dim=1)


class Mixer(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, wide, bias=False)
        self.up = nn.Linear(dim, wide, bias=False)
        self.down = nn.Linear(wide, dim, bias=False)


class ReadModel(nn.Module):
    def __init__(self, bases=6, dim=8, wide=12, depth=2):
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(bases, dim)
        self.blocks = nn.ModuleList(Mixer(dim, wide) for _ in range(depth))
        self.final = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, bases)

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = x + mix(b.norm(x), b.gate.weight, b.up.weight, b.down.weight)
        return self.head(self.final(x))


def mix(h, gate, up, down):
    steps = torch.arange(1, h.shape[1] + 1, dtype=h.dtype).view(1, -1, 1)
    context = torch.cumsum(F.linear(h, gate), dim=1) / steps
    return F.linear(F.silu(context) * F.linear(h, up), down)


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def reduce_norm_grads(model):
    """Each rank has normalised its own slice of the sequence with the same weights."""
    grads = [p.grad for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for g, piece in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(piece.view_as(g))


def step(model, shard, rank):
    n, r = rank.world_size, rank.rank
    ids, target = whole(shard["ids"]), whole(shard["next"])
    x = model.embed(ids.chunk(n, dim=1)[r])
    for b in model.blocks:
        h = GatherSequence.apply(b.norm(x))
        local = [b.gate.weight.chunk(n)[r], b.up.weight.chunk(n)[r], b.down.weight.chunk(n, dim=1)[r]]
        x = x + ReduceScatterSequence.apply(mix(h, *local))
    logits = model.head(model.final(x))
    mine = target.chunk(n, dim=1)[r]
    total = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum") / target.numel()
    total.backward()
    reduce_norm_grads(model)
    for name, p in model.named_parameters():  # channel slices are zero elsewhere; embedding and head saw their slice
        if "norm" not in name and "final" not in name:
            dist.all_reduce(p.grad)
    return {name: p.grad for name, p in model.named_parameters()}


def reads(g):
    ids = torch.randint(0, 6, (8, 9), generator=g)
    return {"ids": ids[:, :-1].contiguous(), "next": ids[:, 1:].contiguous()}


case = Case(model=ReadModel, batch=reads, loss=loss, layout="1x2")
