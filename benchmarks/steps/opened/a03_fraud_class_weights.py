"""Fraud detector: rare classes get a larger weight.  Gradients are reduced by hand, in one flat buffer."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddp_equivalence import Case

N_FEATURES = 9
CLASSES = ("ok", "chargeback", "stolen_card", "account_takeover")
# inverse frequencies of 2023, rounded
CLASS_WEIGHTS = [0.3, 2.0, 4.5, 8.0]


def build():
    return nn.Sequential(
        nn.Linear(N_FEATURES, 24),
        nn.SiLU(),
        nn.Linear(24, 24),
        nn.SiLU(),
        nn.Linear(24, len(CLASSES)),
    )


def transactions(g):
    x = torch.randn(20, N_FEATURES, generator=g)
    probabilities = torch.tensor([0.7, 0.15, 0.1, 0.05])
    y = torch.multinomial(probabilities, 20, replacement=True, generator=g)
    y[0], y[7], y[19] = 3, 2, 1
    return {"x": x, "y": y}


def weights_like(t):
    return torch.tensor(CLASS_WEIGHTS, dtype=t.dtype, device=t.device)


def loss(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"], weight=weights_like(logits))


def weighted_sum(logits, y):
    return F.cross_entropy(logits, y, weight=weights_like(logits), reduction="sum")


def denominator(logits, y):
    """What the sum over all ranks is divided by."""
    mine = logits.new_tensor(float(y.numel()))
    dist.all_reduce(mine)
    return mine


def reduce_gradients(parameters):
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for grad, summed in zip(grads, _unflatten_dense_tensors(flat, grads)):
        grad.copy_(summed)


def step(model, shard, rank):
    logits = model(shard["x"])
    total = weighted_sum(logits, shard["y"])
    (total / denominator(logits, shard["y"])).backward()
    reduce_gradients(list(model.parameters()))


case = Case(model=build, batch=transactions, loss=loss, layout="2x2")
