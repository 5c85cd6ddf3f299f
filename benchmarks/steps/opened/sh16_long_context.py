"""Causal attention over long seismograms: each rank has a stretch of the time axis, keys and values are gathered."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class GatherTime(torch.autograd.Function):
    """[B, H, t, d] of each rank -> [B, H, T, d]; gradients are summed and cut again."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()].contiguous()


def rotate(x, start=0, base=100.0):
    """Rotary phases for the time steps start, start + 1, ..."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = (start + torch.arange(x.shape[-2], dtype=x.dtype)).unsqueeze(1) * freq
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, start=0, spread=None):
        q = rotate(self.split(self.q(x)), start)
        k, v = rotate(self.split(self.k(x))), self.split(self.v(x))
        if spread is not None:
            k, v = spread(k), spread(v)
        rows = start + torch.arange(q.shape[2]).unsqueeze(1)
        visible = torch.arange(k.shape[2]).unsqueeze(0) <= rows
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o(y.transpose(1, 2).flatten(2))


class Seismo(nn.Module):
    def __init__(self, channels=3, dim=8, heads=2, depth=2):
        super().__init__()
        torch.manual_seed(83)
        self.inp = nn.Linear(channels, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.layers = nn.ModuleList(Attention(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, channels)

    def forward(self, x, **where):
        h = self.inp(x)
        for norm, layer in zip(self.norms, self.layers):
            h = h + layer(norm(h), **where)
        return self.out(h)


def loss(model, batch):
    return (model(batch["trace"]) - batch["next"]).square().mean()


def collect(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def step(model, shard, rank):
    trace, target = collect(shard["trace"]), collect(shard["next"])
    stretch = trace.shape[1] // rank.world_size
    start = rank.rank * stretch
    here = slice(start, start + stretch)
    predicted = model(trace[:, here], start=start, spread=GatherTime.apply)
    ((predicted - target[:, here]).square().sum() / target.numel()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return {name: p.grad for name, p in model.named_parameters()}


def seismograms(g):
    x = torch.randn(8, 13, 3, generator=g).cumsum(1) * 0.3
    return {"trace": x[:, :-1].contiguous(), "next": x[:, 1:].contiguous()}


case = Case(model=Seismo, batch=seismograms, loss=loss, layout="1x4")
