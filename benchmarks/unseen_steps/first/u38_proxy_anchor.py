"""Deep metric learning with learned class proxies (proxy-anchor loss). The exponentials per proxy are summed over the
global batch with a differentiable all-reduce, and DDP averages the gradients."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

CLASSES, MARGIN, ALPHA = 10, 0.1, 6.0


class MetricNet(nn.Module):
    def __init__(self, dim=14, hidden=32, embed=10):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, embed))
        self.proxies = nn.Parameter(torch.randn(CLASSES, embed))

    def forward(self, x):
        z = F.normalize(self.embed(x), dim=1)
        return z @ F.normalize(self.proxies, dim=1).t()


def build_model():
    return MetricNet()


def make_batch(generator):
    n = 18
    label = torch.randint(0, CLASSES - 2, (n,), generator=generator)
    centres = torch.randn(CLASSES, 14, generator=generator)
    return {"x": centres[label] + 0.5 * torch.randn(n, 14, generator=generator), "label": label}


def proxy_sums(cosine, label):
    """Per proxy: summed exponentials of its positives and of its negatives."""
    onehot = F.one_hot(label, CLASSES).bool()
    zero = torch.zeros_like(cosine)
    positive = torch.where(onehot, torch.exp(-ALPHA * (cosine - MARGIN)), zero).sum(dim=0)
    negative = torch.where(onehot, zero, torch.exp(ALPHA * (cosine + MARGIN))).sum(dim=0)
    return positive, negative


def combine(positive, negative, valid):
    return torch.log1p(positive).sum() / valid + torch.log1p(negative).sum() / CLASSES


def loss(model, batch):
    positive, negative = proxy_sums(model(batch["x"]), batch["label"])
    valid = (F.one_hot(batch["label"], CLASSES).sum(dim=0) > 0).sum()
    return combine(positive, negative, valid)


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def count_valid_proxies(label):
    """Number of proxies that have a positive in the batch."""
    present = F.one_hot(label, CLASSES).sum(dim=0) > 0
    valid = present.sum()
    dist.all_reduce(valid)
    return valid


def proxy_anchor(cosine, label):
    positive, negative = proxy_sums(cosine, label)
    positive, negative = AllReduce.apply(torch.stack([positive, negative])).unbind(0)
    return combine(positive, negative, count_valid_proxies(label))


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    value = proxy_anchor(ddp(shard["x"]), shard["label"])
    value.backward()
