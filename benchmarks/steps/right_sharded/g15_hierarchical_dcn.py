"""Click prediction with a cross network; gradients travel inside a host, between the hosts' leaders, and back."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

BUCKETS, DENSE, DIM = 50, 4, 5


class CrossLayer(nn.Module):
    def __init__(self, width, rank=3):
        super().__init__()
        self.u, self.v = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, x0, x):
        return x0 * self.v(self.u(x)) + x


class DCNv2(nn.Module):
    def __init__(self):
        super().__init__()
        self.hashed = nn.EmbeddingBag(BUCKETS, DIM, mode="sum")
        self.projection = nn.Linear(DENSE, DIM, bias=False).requires_grad_(False)  # random features
        self.cross = nn.ModuleList(CrossLayer(2 * DIM) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(2 * DIM, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, sparse, dense):
        x0 = x = torch.cat([self.hashed(sparse), torch.cos(self.projection(dense))], 1)
        for layer in self.cross:
            x = layer(x0, x)
        return self.deep(x).squeeze(1)


def log_lines(generator):
    return {
        "sparse": torch.randint(0, BUCKETS, (16, 6), generator=generator),
        "dense": torch.randn(16, DENSE, generator=generator),
        "click": torch.randint(0, 2, (16,), generator=generator),
    }


def ctr_loss(model, batch):
    logits = model(batch["sparse"], batch["dense"])
    return F.binary_cross_entropy_with_logits(logits, batch["click"].to(logits))


class Topology:
    def __init__(self, rank, per_host=2):
        hosts = rank.world_size // per_host
        self.is_leader = rank.rank % per_host == 0
        self.leader = rank.rank - rank.rank % per_host
        self.host, _ = dist.new_subgroups(per_host)
        self.leaders = dist.new_group([h * per_host for h in range(hosts)])
        self.world = rank.world_size


class HierarchicalReducer:
    """Collects gradients in buckets as they arrive, and sends each bucket up and down the tree at the end."""

    def __init__(self, model, topology, bucket_elements=64):
        self.topology, self.limit = topology, bucket_elements
        self.buckets, self.space = [], 0
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.collect)

    def collect(self, param):
        # half of the division here, the other half on the way down: keeps the sums small in between
        param.grad.div_(2)
        if param.numel() > self.space:
            self.buckets.append([])
            self.space = self.limit
        self.buckets[-1].append(param)
        self.space -= param.numel()

    def flush(self, unscale):
        t = self.topology
        for bucket in reversed(self.buckets):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.reduce(flat, dst=t.leader, group=t.host)
            if t.is_leader:
                dist.all_reduce(flat, group=t.leaders)
                flat.mul_(2 / t.world)
            dist.broadcast(flat, src=t.leader, group=t.host)
            for p, g in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(g.view_as(p)).div_(unscale)
        self.buckets, self.space = [], 0


class CTRTrainer:
    loss_scale = 2.0**10

    def __init__(self, model, rank):
        self.model, self.reducer = model, HierarchicalReducer(model, Topology(rank))

    def fit_batch(self, batch):
        (ctr_loss(self.model, batch) * self.loss_scale).backward()
        self.reducer.flush(unscale=self.loss_scale)


def step(model, shard, rank):
    CTRTrainer(model, rank).fit_batch(shard)
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


case = Case(model=DCNv2, batch=log_lines, loss=ctr_loss, layout="2x2")
