"""Radiation scheme emulator with split hidden layers and a bound on the norm of the whole gradient.
The reference minimises the same objective, with the gradient shortened by the same rule."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

MAX_NORM = 0.05
SPLIT = {"hidden.weight": 0, "hidden.bias": 0, "merge.weight": 1}


class Radiation(nn.Module):
    def __init__(self, levels=8, hidden=12):
        super().__init__()
        torch.manual_seed(23)
        self.scale = nn.LayerNorm(levels)
        self.hidden = nn.Linear(levels, hidden)
        self.merge = nn.Linear(hidden, levels, bias=False)
        self.heating = nn.Linear(levels, levels)

    def forward(self, x):
        x = self.scale(x)
        return self.heating(x + self.merge(F.softplus(self.hidden(x))))


def objective(prediction, target):
    return (prediction - target).abs().pow(1.5).mean()


def shortening(norm):
    return (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)


def loss(model, batch):
    value = objective(model(batch["profile"]), batch["rate"])
    grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    norm = torch.stack([g.norm() for g in grads]).norm()
    return value * shortening(norm).detach()


class ToSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class FromSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def take_slices(model, rank):
    own = {}
    for name, p in model.named_parameters():
        piece = p.detach()
        if name in SPLIT:
            piece = piece.chunk(rank.world_size, dim=SPLIT[name])[rank.rank]
        own[name] = piece.clone().requires_grad_(True)
    return own


def forward(w, x):
    x = F.layer_norm(x, x.shape[-1:], w["scale.weight"], w["scale.bias"])
    h = F.softplus(F.linear(ToSlices.apply(x), w["hidden.weight"], w["hidden.bias"]))
    return F.linear(x + FromSlices.apply(F.linear(h, w["merge.weight"])), w["heating.weight"], w["heating.bias"])


def clip(weights):
    """Shorten the gradient of the whole model, of which this rank has a part."""
    square = torch.stack([w.grad.square().sum() for w in weights.values()]).sum()
    dist.all_reduce(square)
    factor = shortening(square.sqrt())
    for w in weights.values():
        w.grad.mul_(factor)


def gather(t, dim=0):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts, dim=dim)


def step(model, shard, rank):
    profile, rate = gather(shard["profile"]), gather(shard["rate"])
    weights = take_slices(model, rank)
    objective(forward(weights, profile), rate).backward()
    clip(weights)
    return {k: gather(w.grad, SPLIT[k]) if k in SPLIT else w.grad for k, w in weights.items()}


def columns(g):
    return {"profile": torch.randn(8, 8, generator=g), "rate": torch.randn(8, 8, generator=g)}


case = Case(model=Radiation, batch=columns, loss=loss, layout="1x2")
