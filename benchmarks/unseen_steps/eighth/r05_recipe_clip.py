"""Recipes and photographs of dishes in one space: symmetric InfoNCE, with the negatives of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

DISHES, PIXELS, INGREDIENTS, SPACE = 16, 12, 20, 5


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.photo = nn.Sequential(nn.Linear(PIXELS, 10), nn.GELU(), nn.Linear(10, SPACE))
        self.recipe = nn.Sequential(nn.Linear(INGREDIENTS, SPACE), nn.LayerNorm(SPACE))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, photos, recipes):
        return (
            F.normalize(self.photo(photos), dim=-1),
            F.normalize(self.recipe(recipes), dim=-1),
            self.log_scale.exp(),
        )


def make_batch(generator):
    return {
        "photos": torch.randn(DISHES, PIXELS, generator=generator),
        "recipes": (torch.rand(DISHES, INGREDIENTS, generator=generator) < 0.3).float(),
    }


def loss(model, batch):
    photo, recipe, scale = model(batch["photos"], batch["recipes"])
    logits = scale * photo @ recipe.T
    labels = torch.arange(len(photo))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class GatherRows(torch.autograd.Function):
    """Rows of all ranks; each rank's row gets the derivatives of all ranks' losses."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start : start + ctx.rows]


class Pool:
    """Embeddings of all ranks, in the order of the ranks."""

    def __init__(self, rank):
        self.first_of = rank.rank
        self.world_size = rank.world_size

    def everyone(self, rows):
        return GatherRows.apply(rows)

    def memory(self, rows):
        bank = [torch.zeros_like(rows) for _ in range(self.world_size)]
        dist.all_gather(bank, rows.detach())
        bank[self.first_of] = rows
        return torch.cat(bank)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    photo, recipe, scale = ddp(shard["photos"], shard["recipes"])
    pool = Pool(rank)
    all_recipes = pool.everyone(recipe)
    all_photos = pool.memory(photo)
    labels = rank.rank * len(photo) + torch.arange(len(photo))
    from_photo = F.cross_entropy(scale * photo @ all_recipes.T, labels)
    from_recipe = F.cross_entropy(scale * recipe @ all_photos.T, labels)
    ((from_photo + from_recipe) / 2).backward()


case = Case(model=TwoTowers, batch=make_batch, loss=loss, layout="1x4")
