"""Reversible coupling network for turbulence snapshots. Activations are not kept: the backward pass walks from the
output to the input and rebuilds them. The same pair of sub-networks is used at each depth."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


def subnet(dim):
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class RevFlow(nn.Module):
    def __init__(self, inputs=6, dim=5, depth=3):
        super().__init__()
        torch.manual_seed(29)
        self.depth = depth
        self.stem = nn.Linear(inputs, 2 * dim)
        self.f, self.g = subnet(dim), subnet(dim)
        self.read = nn.Linear(2 * dim, inputs)
        self.read.weight = nn.Parameter(self.stem.weight.detach().t().contiguous())

    def couple(self, x):
        a, b = x.chunk(2, dim=-1)
        for _ in range(self.depth):
            a = a + self.f(b)
            b = b + self.g(a)
        return torch.cat([a, b], dim=-1)

    def forward(self, x):
        return self.read(self.couple(self.stem(x)))


class Rebuild(torch.autograd.Function):
    """The coupling without stored activations; weights' gradients are left in .grad on the way."""

    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        y = net.couple(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        net = ctx.net
        a, b = (t.detach() for t in ctx.saved_tensors[0].chunk(2, dim=-1))
        da, db = (t.clone() for t in grad.chunk(2, dim=-1))
        for _ in range(net.depth):
            b, db_to_a = Rebuild.undo(net.g, a, b, db)
            da = da + db_to_a
            a, da_to_b = Rebuild.undo(net.f, b, a, da)
            db = db + da_to_b
        return torch.cat([da, db], dim=-1), None

    @staticmethod
    def undo(module, known, summed, grad):
        with torch.enable_grad():
            source = known.detach().requires_grad_(True)
            term = module(source)
            torch.autograd.backward(term, grad)
        return summed - term.detach(), source.grad


def loss(model, batch):
    return (model(batch["now"]) - batch["next"]).square().mean()


def sum_over_ranks(params, bucket_elements=100):
    """All-reduce in buckets, last layers first."""
    queue, pending = list(params)[::-1], []
    while queue:
        bucket = [queue.pop(0)]
        while queue and sum(p.numel() for p in bucket) < bucket_elements:
            bucket.append(queue.pop(0))
        flat = torch.cat([p.grad.flatten() for p in bucket])
        pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
    for work, flat, bucket in pending:
        work.wait()
        for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = piece.view_as(p)


def step(model, shard, rank):
    now, later = shard["now"], shard["next"]
    elements = later.numel() * rank.world_size
    for x, y in zip(now.split(2), later.split(2)):
        predicted = model.read(Rebuild.apply(model.stem(x), model))
        ((predicted - y).square().sum() / elements).backward()
    sum_over_ranks(model.parameters())
    return {name: p.grad for name, p in model.named_parameters()}


def snapshots(g):
    return {"now": torch.randn(16, 4, 6, generator=g), "next": torch.randn(16, 4, 6, generator=g)}


case = Case(model=RevFlow, batch=snapshots, loss=loss, layout="1x4")
