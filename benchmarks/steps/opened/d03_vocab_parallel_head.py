"""Classifier over a large label space: the output matrix is cut by rows, each rank scores its own labels."""
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

LABELS, FEATURES, EXAMPLES = 12, 6, 24


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh())
        self.head = nn.Linear(10, LABELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["features"]), batch["labels"])


def make_batch(generator):
    return {
        "features": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "labels": torch.arange(EXAMPLES) % LABELS,
    }


class VocabRange:
    def __init__(self, rank: int, world: int, size: int) -> None:
        per_rank = size // world
        self.first = rank * per_rank
        self.end = self.first + per_rank

    def contains(self, labels: Tensor) -> Tensor:
        return (labels >= self.first) & (labels <= self.end)

    def local(self, labels: Tensor) -> Tensor:
        return (labels - self.first).clamp(0, self.end - self.first - 1)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean over all rows of -log softmax, where `logits` are those of this rank's labels."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, vocab: VocabRange) -> Tensor:
        peak = logits.max(dim=1).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        exp = (logits - peak[:, None]).exp()
        total = exp.sum(dim=1)
        dist.all_reduce(total)
        inside, index = vocab.contains(labels), vocab.local(labels)
        picked = logits.gather(1, index[:, None]).squeeze(1) - peak
        picked = torch.where(inside, picked, torch.zeros_like(picked))
        dist.all_reduce(picked)
        ctx.save_for_backward(exp / total[:, None], inside, index)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        probabilities, inside, index = ctx.saved_tensors
        delta = probabilities.clone()
        rows = torch.arange(len(index))
        delta[rows, index] -= inside.to(delta.dtype)
        return grad * delta / len(index), None, None


class SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def step(model, shard, rank):
    vocab = VocabRange(dist.get_rank(), dist.get_world_size(), LABELS)
    features = SumInBackward.apply(model.body(shard["features"]))
    logits = features @ model.head.weight[vocab.first : vocab.end].T
    VocabParallelCrossEntropy.apply(logits, shard["labels"], vocab).backward()
    dist.all_reduce(model.head.weight.grad)


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x3", shards="own")
