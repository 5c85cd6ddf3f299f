"""Fully sharded by hand: flat parameters, gathered for the forward, scattered in the backward."""
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from ddp_equivalence import Case


def build():
    return nn.Sequential(
        nn.Linear(8, 11), nn.GELU(), nn.LayerNorm(11), nn.Linear(11, 11), nn.GELU(), nn.Linear(11, 3)
    )


def make_batch(generator):
    x = torch.randn(24, 8, generator=generator)
    return {"x": x, "y": torch.stack([x[:, 0] * x[:, 1], x.sum(1), x.norm(dim=1)], dim=1)}


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, place):
        world = dist.get_world_size()
        ctx.place, ctx.size = place, piece.numel()
        pieces = [torch.empty_like(piece) for _ in range(world)]
        dist.all_gather(pieces, piece.detach())
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, grad):
        # gloo has no reduce_scatter: reduce everything and keep the piece of this rank
        grad = grad.contiguous() / dist.get_world_size()
        dist.all_reduce(grad)
        return grad.narrow(0, ctx.place * ctx.size, ctx.size), None


class FlatShard:
    def __init__(self, module, rank):
        self.module, self.rank = module, rank
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.used = flat.numel()
        flat = F.pad(flat, (0, -self.used % rank.world_size))
        size = flat.numel() // rank.world_size
        self.piece = flat[rank.rank * size :][:size].clone().requires_grad_()

    def __call__(self, *inputs):
        flat = Gather.apply(self.piece, self.rank.local_rank)[: self.used]
        views = flat.split([shape.numel() for shape in self.shapes.values()])
        weights = {
            name: view.view(shape) for (name, shape), view in zip(self.shapes.items(), views)
        }
        return functional_call(self.module, weights, inputs)

    def export_gradients(self):
        pieces = [torch.empty_like(self.piece) for _ in range(self.rank.world_size)]
        dist.all_gather(pieces, self.piece.grad)
        views = torch.cat(pieces)[: self.used].split([s.numel() for s in self.shapes.values()])
        for p, view in zip(self.module.parameters(), views):
            p.grad = view.view_as(p).clone()


def step(model, shard, rank):
    sharded = FlatShard(model, rank)
    loss(sharded, shard).backward()
    sharded.export_gradients()


case = Case(model=build, batch=make_batch, loss=loss, layout="2x2")
