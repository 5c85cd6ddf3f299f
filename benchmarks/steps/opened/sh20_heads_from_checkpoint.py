"""Vision transformer for retina scans: a checkpoint of the whole model is cut into head-parallel pieces on load."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        return x + attend(self.norm(x), self.qkv.weight, self.qkv.bias, self.out.weight, self.heads)


class RetinaViT(nn.Module):
    def __init__(self, dim=8, heads=4, depth=2, grades=5):
        super().__init__()
        torch.manual_seed(91)
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.grade = nn.Linear(dim, grades)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.grade(self.blocks(x).mean(1))


def attend(x, qkv, bias, out, heads):
    q, k, v = F.linear(x, qkv, bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v)
    return F.linear(y.transpose(1, 2).flatten(2), out)


def loss(model, batch):
    return F.cross_entropy(model(batch["scan"]), batch["grade"])


def gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def total(t):
    t = t.clone()
    dist.all_reduce(t)
    return t


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def owned(name, tensor, rank, size):
    """(dimension, indices) of what this rank loads of a tensor; None: all of it."""
    if ".qkv." in name:
        return 0, torch.arange(tensor.shape[0]).chunk(size)[rank]
    if name.endswith("out.weight"):
        return 1, torch.arange(tensor.shape[1]).chunk(size)[rank]
    return None


def load(checkpoint, rank):
    pieces = {}
    where = {name: owned(name, t, rank.rank, rank.world_size) for name, t in checkpoint.items()}
    for name, t in checkpoint.items():
        t = t if where[name] is None else t.index_select(*where[name])
        pieces[name] = t.clone().requires_grad_(True)
    return pieces, where


def forward(model, w, x, size):
    x = F.conv2d(x, w["patch.weight"], w["patch.bias"], stride=4).flatten(2).transpose(1, 2)
    for i, block in enumerate(model.blocks):
        b = {key: w[f"blocks.{i}.{key}"] for key, _ in block.named_parameters()}
        h = F.layer_norm(x, x.shape[-1:], b["norm.weight"], b["norm.bias"])
        h.register_hook(total)  # each rank's heads send back their part
        x = x + SumOut.apply(attend(h, b["qkv.weight"], b["qkv.bias"], b["out.weight"], block.heads // size))
    return F.linear(x.mean(1), w["grade.weight"], w["grade.bias"])


def step(model, shard, rank):
    full = {key: gather(value) for key, value in shard.items()}
    w, where = load({k: p.detach() for k, p in model.named_parameters()}, rank)
    F.cross_entropy(forward(model, w, full["scan"], rank.world_size), full["grade"]).backward()
    grads = {name: t.grad for name, t in w.items()}
    for name, p in model.named_parameters():
        if where[name] is not None:
            grads[name] = total(torch.zeros_like(p).index_copy(*where[name], grads[name]))
    return grads


def scans(g):
    return {"scan": torch.randn(8, 3, 8, 8, generator=g), "grade": torch.randint(0, 5, (8,), generator=g)}


case = Case(model=RetinaViT, batch=scans, loss=loss, layout="1x2")
