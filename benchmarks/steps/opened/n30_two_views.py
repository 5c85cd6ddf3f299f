"""SimCLR on ECG strips: two augmented views of each, contrasted with the strips of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STRIPS, LENGTH, DIM = 12, 24, 6


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = nn.Conv1d(1, 8, 5, stride=2)
        self.head = nn.Sequential(nn.Linear(8 * 10, 16), nn.ReLU(), nn.Linear(16, DIM))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, strips):
        return F.normalize(self.head(torch.relu(self.wave(strips[:, None])).flatten(1)), dim=-1)


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local):
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class ManyNegatives(nn.Module):
    """InfoNCE from one view to the other, in both directions."""

    def __init__(self, gather=None):
        super().__init__()
        self.gather = gather

    def candidates(self, view):
        return view if self.gather is None else self.gather(view).flatten(0, 1)

    def one_way(self, anchors, others, scale):
        logits = scale * anchors @ self.candidates(others).T
        positives = torch.arange(anchors.shape[0], device=anchors.device)
        return F.cross_entropy(logits, positives)

    def forward(self, first, second, scale):
        return (self.one_way(first, second, scale) + self.one_way(second, first, scale)) / 2


class Views(nn.Module):
    """Both views in one call, as DDP needs it."""

    def __init__(self, encoder, criterion):
        super().__init__()
        self.encoder, self.criterion = encoder, criterion

    def forward(self, batch):
        embedded = self.encoder(torch.cat([batch["first"], batch["second"]]))
        first, second = embedded.chunk(2)
        return self.criterion(first, second, self.encoder.log_scale.exp())


def make_batch(generator):
    strips = torch.randn(STRIPS, LENGTH, generator=generator).cumsum(-1) * 0.4
    jitter = torch.randn(2, STRIPS, LENGTH, generator=generator) * 0.2
    return {"first": strips + jitter[0], "second": strips + jitter[1]}


def loss(model, batch):
    return Views(model, ManyNegatives())(batch)


def step(model, shard, rank):
    ddp = DistributedDataParallel(Views(model, ManyNegatives(gather=AllGather.apply)))
    ddp(shard).backward()


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x2")
