"""A fused projection + cross entropy that makes its gradients in forward, chunk by chunk."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case, Rank

V, D, T, B = 29, 8, 7, 8
IGNORE = -100


class FusedLinearCE(torch.autograd.Function):
    """Mean cross entropy of ``h @ weight.T``, without ever holding all logits."""

    @staticmethod
    def forward(ctx, h: Tensor, weight: Tensor, target: Tensor, chunks: int) -> Tensor:
        n = (target != IGNORE).sum()
        total = h.new_zeros(())
        grad_h, grad_w = torch.zeros_like(h), torch.zeros_like(weight)
        for rows in torch.arange(len(h)).chunk(chunks):
            rows = rows[target[rows] != IGNORE]
            if not len(rows):
                continue
            logits = h[rows] @ weight.T
            total += F.cross_entropy(logits, target[rows], reduction="sum")
            d = logits.softmax(-1)
            d[torch.arange(len(rows)), target[rows]] -= 1
            d /= n
            grad_h[rows] = d @ weight
            grad_w += d.T @ h[rows]
        ctx.save_for_backward(grad_h, grad_w)
        return total / n

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        grad_h, grad_w = ctx.saved_tensors
        return grad_h, grad_w, None, None


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.ff = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, fused: bool = False) -> Tensor:
        x = self.wte(ids)
        x = x + self.ff(x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None])
        x, labels = x.flatten(0, 1), labels.flatten()
        if fused:
            return FusedLinearCE.apply(x, self.lm_head.weight, labels, 4)
        return F.cross_entropy(self.lm_head(x), labels, ignore_index=IGNORE)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(0, V, (B, T), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORE
    answer = torch.randint(0, 4, (B, 1), generator=generator) + torch.arange(B)[:, None] // 4 * 2
    labels[torch.arange(T)[None] < answer] = IGNORE
    return {"ids": ids, "labels": labels}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["ids"], batch["labels"])


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="2x2")


def share_of_tokens(labels: Tensor) -> Tensor:
    mine = (labels != IGNORE).sum().double()
    everyone = mine.clone()
    dist.all_reduce(everyone)
    return mine / everyone


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DDP(model)
    mean = ddp(shard["ids"], shard["labels"], fused=True)
    # back from the mean over this rank's tokens to the mean over all, and undo DDP's division
    (mean * share_of_tokens(shard["labels"]) * dist.get_world_size()).backward()
