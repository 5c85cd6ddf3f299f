"""Denoising auto-encoder over user/item interactions (AutoRec style), sharded along items where that divides."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from ddp_equivalence import Case

ITEMS, BOTTLENECK = 20, 7


class AutoRec(nn.Module):
    """The decoder reuses the encoder's matrix, transposed."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(ITEMS, BOTTLENECK)
        self.squeeze = nn.Sequential(nn.Linear(BOTTLENECK, 3), nn.Tanh(), nn.Linear(3, BOTTLENECK))
        self.item_bias = nn.Parameter(torch.zeros(ITEMS))
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, clicks):
        h = torch.tanh(self.encoder(F.normalize(clicks, dim=1)))
        h = h + self.squeeze(h)
        return self.log_scale.exp() * F.linear(h, self.encoder.weight.t()) + self.item_bias


class InteractionSource:
    """Users with a handful of clicks each."""

    def __init__(self, users, density):
        self.users, self.density = users, density

    def __call__(self, generator):
        clicks = (torch.rand(self.users, ITEMS, generator=generator) < self.density).to(torch.get_default_dtype())
        clicks[:, 0] = 1  # everybody has seen the landing page
        return {"clicks": clicks, "weight": torch.rand(self.users, generator=generator) + 0.5}


def multinomial_nll(model, batch):
    logits = model(batch["clicks"])
    per_user = -(F.log_softmax(logits, dim=1) * batch["clicks"]).sum(1)
    return (per_user * batch["weight"].to(per_user)).mean()


class Placement:
    """Wide matrices are split along their columns, the others along their rows however few these are."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __call__(self, param):
        if param.ndim == 2 and param.shape[0] < param.shape[1] and param.shape[1] % self.world_size == 0:
            return Shard(1)
        return Shard(0)


class ShardedRunner:
    def __init__(self, model, world_size):
        placement = Placement(world_size)
        fully_shard(model.squeeze, shard_placement_fn=placement, reshard_after_forward=False)
        self.model = fully_shard(model, shard_placement_fn=placement, reshard_after_forward=False)

    def run(self, batch, passes=2):
        # the first half of the users, then the second half; their gradients add up in the shards
        for part in range(passes):
            piece = {k: v.chunk(passes)[part] for k, v in batch.items()}
            (multinomial_nll(self.model, piece) / passes).backward()
        return {name: p.grad for name, p in self.model.named_parameters()}


def step(model, shard, rank):
    return ShardedRunner(model, rank.world_size).run(shard)


case = Case(model=AutoRec, batch=InteractionSource(16, 0.3), loss=multinomial_nll, layout="1x4")
