"""Self-supervised rotation prediction with a tiny patch transformer on four ranks. A DDP communication hook splits the
averaging into a division before and one after the sum, so that long sums stay in range."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attention = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(d // self.heads), dim=-1)
        x = x + self.out((attention @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class RotationNet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 3, stride=3)
        self.position = nn.Parameter(0.1 * torch.randn(1, 9, dim))
        self.block = Block(dim)
        self.head = nn.Linear(dim, 4)

    def forward(self, image):
        tokens = self.patch(image).flatten(2).transpose(1, 2) + self.position
        return self.head(self.block(tokens).mean(dim=1))


def build_model():
    return RotationNet()


def make_batch(generator):
    n = 16
    image = torch.randn(n, 1, 9, 9, generator=generator)
    turns = torch.randint(0, 4, (n,), generator=generator)
    rotated = torch.stack([torch.rot90(im, int(k), (1, 2)) for im, k in zip(image, turns)])
    return {"image": rotated, "turns": turns}


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["turns"], label_smoothing=0.1)


class HookState:
    """Factors of the two divisions around the sum."""

    def __init__(self, world_size):
        exponent = int(math.log2(world_size)) // 2
        self.predivide = float(2 ** exponent)
        self.postdivide = float(world_size)


def two_stage_average(state, bucket):
    buffer = bucket.buffer()
    if state.predivide > 1:
        buffer.div_(state.predivide)
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def finish(fut):
        return fut.value()[0].div_(state.postdivide)

    return future.then(finish)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


def step(model, shard, rank):
    ddp = DDP(model)
    ddp.register_comm_hook(HookState(rank.world_size), two_stage_average)
    logits = ddp(shard["image"])
    F.cross_entropy(logits, shard["turns"], label_smoothing=0.1).backward()
