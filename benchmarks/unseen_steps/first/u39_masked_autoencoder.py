"""Masked patch reconstruction. The gradient averaging is sharded by hand: each parameter has an owner that receives the
sum, averages it and hands the result back to the other ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

PATCHES, PATCH_DIM, MASKED = 9, 6, 4


class MaskedAutoencoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Linear(PATCH_DIM, dim)
        self.mask_token = nn.Parameter(0.1 * torch.randn(dim))
        self.position = nn.Parameter(0.1 * torch.randn(PATCHES, dim))
        self.mix_tokens = nn.Linear(PATCHES, PATCHES)
        self.mix_channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.decode = nn.Linear(dim, PATCH_DIM)

    def forward(self, patches, mask):
        tokens = self.embed(patches)
        tokens = torch.where(mask[..., None], self.mask_token.expand_as(tokens), tokens) + self.position
        tokens = tokens + self.mix_tokens(tokens.transpose(1, 2)).transpose(1, 2)
        tokens = tokens + self.mix_channels(tokens)
        return self.decode(tokens)


def build_model():
    return MaskedAutoencoder()


def make_batch(generator):
    n = 12
    order = torch.rand(n, PATCHES, generator=generator).argsort(dim=1)
    return {
        "patches": torch.randn(n, PATCHES, PATCH_DIM, generator=generator).cumsum(dim=1),
        "mask": order < MASKED,
    }


def reconstruction(pred, patches, mask):
    """Each image hides the same number of patches; targets are normalised per patch."""
    target = F.layer_norm(patches, (PATCH_DIM,))
    error = (pred - target).pow(2).mean(dim=-1)
    return (error * mask).sum() / (mask.shape[0] * MASKED)


def loss(model, batch):
    pred = model(batch["patches"], batch["mask"])
    return reconstruction(pred, batch["patches"], batch["mask"])


class ShardedAverager:
    """Spreads the averaging work: parameters go to the least loaded rank, largest first."""

    def __init__(self, params, rank):
        self.params = list(params)
        self.rank = rank
        self.owners = self.assign()

    def assign(self):
        load = [0] * self.rank.world_size
        owners = {}
        for i in sorted(range(len(self.params)), key=lambda i: -self.params[i].numel()):
            owner = load.index(min(load))
            owners[i] = owner
            load[owner] += self.params[i].numel()
        return owners

    def reduce_to_owners(self):
        for i, p in enumerate(self.params):
            dist.reduce(p.grad, dst=self.owners[i])
            if self.owners[i] == self.rank.rank:
                p.grad.div_(self.rank.world_size)

    def share_results(self):
        for i, p in enumerate(self.params):
            dist.broadcast(p.grad, src=i % self.rank.world_size)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    averager = ShardedAverager(model.parameters(), rank)
    pred = model(shard["patches"], shard["mask"])
    reconstruction(pred, shard["patches"], shard["mask"]).backward()
    averager.reduce_to_owners()
    averager.share_results()
