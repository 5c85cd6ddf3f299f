"""Momentum contrast without a queue: queries of the online encoder against the keys that the frozen momentum
encoders of all ranks made from the other view. DDP over the online encoder."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

TEMPERATURE = 0.3


class ConvEncoder(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 12, 5, padding=2)
        self.conv2 = nn.Conv1d(12, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16, dim)

    def forward(self, x):
        x = F.leaky_relu(self.conv1(x), 0.1)
        x = F.leaky_relu(self.conv2(x), 0.1)
        return self.fc(x.mean(dim=-1))


class MomentumContrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = ConvEncoder()
        self.predictor = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        self.momentum = ConvEncoder()
        for online, frozen in zip(self.base.parameters(), self.momentum.parameters()):
            frozen.data.copy_(online.data)
            frozen.requires_grad = False

    def forward(self, x1, x2):
        q1, q2 = self.predictor(self.base(x1)), self.predictor(self.base(x2))
        with torch.no_grad():
            k1, k2 = self.momentum(x1), self.momentum(x2)
        return q1, q2, k1, k2


def build_model():
    return MomentumContrast()


def make_batch(generator):
    n = 16
    base = torch.randn(n, 2, 10, generator=generator)
    return {
        "x1": base + 0.1 * torch.randn(n, 2, 10, generator=generator),
        "x2": base + 0.1 * torch.randn(n, 2, 10, generator=generator),
    }


def loss(model, batch):
    q1, q2, k1, k2 = model(batch["x1"], batch["x2"])

    def term(q, k):
        logits = F.normalize(q, dim=1) @ F.normalize(k, dim=1).t() / TEMPERATURE
        return F.cross_entropy(logits, torch.arange(q.shape[0])) * (2 * TEMPERATURE)

    return term(q1, k2) + term(q2, k1)


@torch.no_grad()
def concat_all_gather(tensor):
    parts = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts, dim=1).flatten(0, 1)


def contrastive_loss(q, k):
    q = F.normalize(q, dim=1)
    k = concat_all_gather(F.normalize(k, dim=1))
    logits = torch.einsum("nc,mc->nm", q, k) / TEMPERATURE
    rows = logits.shape[0]
    labels = torch.arange(rows, dtype=torch.long) + rows * dist.get_rank()
    return F.cross_entropy(logits, labels) * (2 * TEMPERATURE)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    q1, q2, k1, k2 = ddp(shard["x1"], shard["x2"])
    total = contrastive_loss(q1, k2) + contrastive_loss(q2, k1)
    total.backward()
