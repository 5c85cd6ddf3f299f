"""Next-item recommendation over a large catalogue with a chunked, memory-saving softmax."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class SessionConfig:
    items: int = 13
    length: int = 5
    dim: int = 6
    chunk: int = 2
    micro_batches: int = 2
    spread: float = 0.05


CFG = SessionConfig()


class ChunkedSoftmaxLoss(torch.autograd.Function):
    """Mean cross entropy of linear logits that never hold more than `chunk` rows at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, target, chunk):
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ weight.T
            log_prob = logits.log_softmax(dim=-1)
            total -= log_prob.gather(1, target[rows, None]).sum()
            delta = log_prob.exp() - F.one_hot(target[rows], len(weight)).to(logits.dtype)
            delta /= len(hidden)
            grad_hidden[rows] = delta @ weight
            grad_weight += delta.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx, grad_output):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None, None


class SessionEncoder(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.items = nn.Embedding(cfg.items, cfg.dim)
        self.gru = nn.GRU(cfg.dim, cfg.dim, batch_first=True)
        self.catalogue = nn.Linear(cfg.dim, cfg.items, bias=False)

    def forward(self, sessions):
        _, hidden = self.gru(self.items(sessions))
        return hidden[-1], self.catalogue.weight


def reference_loss(model, batch):
    hidden, weight = model(batch["sessions"])
    entropy = F.cross_entropy(F.linear(hidden, weight), batch["next"])
    return entropy + CFG.spread * hidden.square().sum(dim=-1).mean()


class SessionTrainer:
    def __init__(self, model, cfg=CFG):
        self.cfg = cfg
        self.ddp = DistributedDataParallel(model)

    def loss(self, batch):
        hidden, weight = self.ddp(batch["sessions"])
        entropy = ChunkedSoftmaxLoss.apply(hidden, weight, batch["next"], self.cfg.chunk)
        return entropy + self.cfg.spread * hidden.square().sum(dim=-1).mean()

    def train_step(self, batch):
        parts = self.cfg.micro_batches
        columns = [batch["sessions"].chunk(parts), batch["next"].chunk(parts)]
        for index, (sessions, target) in enumerate(zip(*columns, strict=True)):
            last = index == parts - 1
            with nullcontext() if last else self.ddp.no_sync():
                loss = self.loss({"sessions": sessions, "next": target})
                (loss / parts).backward()


def make_batch(generator):
    return {
        "sessions": torch.randint(CFG.items, (16, CFG.length), generator=generator),
        "next": torch.randint(CFG.items, (16,), generator=generator),
    }


case = Case(model=SessionEncoder, batch=make_batch, loss=reference_loss, layout="1x2")


def step(model, shard, rank):
    SessionTrainer(model).train_step(shard)
