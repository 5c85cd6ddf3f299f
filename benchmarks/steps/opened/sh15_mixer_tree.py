"""MLP-Mixer on tiny plankton images, with our own two-level reduction: inside a node first, then one rank of each
node talks over the slow network."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class MixerBlock(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(patches, 6), nn.GELU(), nn.Linear(6, patches))
        self.within = nn.Sequential(nn.Linear(dim, 10), nn.GELU(), nn.Linear(10, dim))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class PlanktonMixer(nn.Module):
    def __init__(self, patch=3, side=9, dim=8, classes=6):
        super().__init__()
        torch.manual_seed(101)
        self.patchify = nn.Conv2d(1, dim, patch, stride=patch)
        self.blocks = nn.Sequential(*[MixerBlock((side // patch) ** 2, dim) for _ in range(2)])
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patchify(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["species"], label_smoothing=0.1)


class TreeReducer:
    def __init__(self, rank, ranks_per_node):
        self.world = rank.world_size
        nodes = self.world // ranks_per_node
        members = [list(range(n * ranks_per_node, (n + 1) * ranks_per_node)) for n in range(nodes)]
        groups = [dist.new_group(m) for m in members]
        self.speakers = dist.new_group([m[0] for m in members])
        home = rank.rank // ranks_per_node
        self.node, self.speaker = groups[home], members[home][0]
        self.speaks = rank.rank == self.speaker

    def mean(self, flat):
        dist.reduce(flat, dst=self.speaker, group=self.node)
        dist.broadcast(flat, src=self.speaker, group=self.node)
        if self.speaks:
            dist.all_reduce(flat, group=self.speakers)
        return flat.div_(self.world)

    def gradients(self, model, bucket_elements=200):
        """Buckets from the last layer to the first."""
        params, bucket = list(model.parameters())[::-1], []
        for i, p in enumerate(params):
            bucket.append(p)
            if sum(q.numel() for q in bucket) >= bucket_elements or i == len(params) - 1:
                self.bucket(bucket)
                bucket = []

    def bucket(self, params):
        flat = self.mean(torch.cat([p.grad.flatten() for p in params]))
        start = 0
        for p in params:
            p.grad.copy_(flat[start:start + p.numel()].view_as(p))
            start += p.numel()


def step(model, shard, rank):
    reducer = TreeReducer(rank, ranks_per_node=2)
    pieces = [{k: v[i:i + 1] for k, v in shard.items()} for i in range(len(shard["species"]))]
    for piece in pieces:
        (loss(model, piece) / len(pieces)).backward()
    reducer.gradients(model)
    return {name: p.grad for name, p in model.named_parameters()}


def catch(g):
    return {"image": torch.rand(12, 1, 9, 9, generator=g), "species": torch.randint(0, 6, (12,), generator=g)}


case = Case(model=PlanktonMixer, batch=catch, loss=loss, layout="2x2")
