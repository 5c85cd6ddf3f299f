"""Supervised contrastive learning on two views per image; the embeddings and labels of all ranks serve
as candidates for each anchor. DDP averages the gradients of the ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

TEMPERATURE = 0.3


class Encoder(nn.Module):
    def __init__(self, dim_in=20, hidden=32, dim_out=10):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(dim_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, dim_out)

    def forward(self, x):
        return F.normalize(self.head(self.backbone(x)), dim=-1)


def build_model():
    return Encoder()


def make_batch(generator):
    n = 16
    base = torch.randn(n, 20, generator=generator)
    return {
        "view_a": base + 0.3 * torch.randn(n, 20, generator=generator),
        "view_b": base + 0.3 * torch.randn(n, 20, generator=generator),
        "label": torch.randint(0, 4, (n,), generator=generator),
    }


def anchor_losses(sim, positive, valid):
    """Mean negative log-probability of each anchor's positives, softmax over the valid candidates."""
    sim = sim.masked_fill(~valid, float("-inf"))
    log_prob = sim - torch.logsumexp(sim, dim=1, keepdim=True)
    positive = positive & valid
    picked = torch.where(positive, log_prob, torch.zeros_like(log_prob))
    return -picked.sum(dim=1) / positive.sum(dim=1)


def loss(model, batch):
    z = torch.cat([model(batch["view_a"]), model(batch["view_b"])])
    label = torch.cat([batch["label"], batch["label"]])
    valid = ~torch.eye(z.shape[0], dtype=torch.bool)
    positive = label[:, None] == label[None, :]
    return anchor_losses(z @ z.t() / TEMPERATURE, positive, valid).mean()


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out, dim=0)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.narrow(0, dist.get_rank() * ctx.n, ctx.n)


@torch.no_grad()
def gather_labels(label):
    out = [torch.empty_like(label) for _ in range(dist.get_world_size())]
    dist.all_gather(out, label)
    return torch.cat(out, dim=0)


def supcon(z, label, rank):
    candidates = AllGather.apply(z)
    candidate_label = gather_labels(label)
    n = z.shape[0]
    own = torch.arange(n)
    valid = torch.ones(n, candidates.shape[0], dtype=torch.bool)
    valid[torch.arange(n), own] = False
    positive = label[:, None] == candidate_label[None, :]
    return anchor_losses(z @ candidates.t() / TEMPERATURE, positive, valid).mean()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    views = torch.cat([shard["view_a"], shard["view_b"]])
    label = torch.cat([shard["label"], shard["label"]])
    z = ddp(views)
    supcon(z, label, rank).backward()
