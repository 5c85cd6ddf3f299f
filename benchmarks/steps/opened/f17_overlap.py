"""Keyword spotting with gradients reduced by hooks while the backward pass is still running."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class SpottingConfig:
    bands: int = 4
    frames: int = 10
    keywords: int = 3
    micro_batch: int = 2


CFG = SpottingConfig()


class KeywordNet(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.depthwise = nn.Conv1d(cfg.bands, cfg.bands, 3, groups=cfg.bands)
        self.pointwise = nn.Conv1d(cfg.bands, 10, 1)
        self.norm = nn.GroupNorm(2, 10)
        self.head = nn.Linear(10, cfg.keywords)

    def forward(self, spectrogram):
        x = F.silu(self.norm(self.pointwise(self.depthwise(spectrogram))))
        return self.head(x.mean(dim=-1))


def spotting_loss(model, batch):
    return F.cross_entropy(model(batch["spectrogram"]), batch["keyword"])


class OverlappedReducer:
    """Starts an all_reduce as soon as a gradient is there; `finish` waits and averages."""

    def __init__(self, model):
        self.model = model
        self.world_size = dist.get_world_size()
        self.pending = []
        self.enabled = True
        self.handles = [
            p.register_post_accumulate_grad_hook(self.on_gradient)
            for p in model.parameters()
            if p.requires_grad
        ]

    def on_gradient(self, parameter):
        if not self.enabled:
            return
        work = dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, async_op=True)
        self.pending.append(work)

    def wait(self):
        while self.pending:
            self.pending.pop(0).wait()

    def finish(self):
        self.wait()
        for parameter in self.model.parameters():
            parameter.grad.div_(self.world_size)

    def detach(self):
        for handle in self.handles:
            handle.remove()


class AccumulatingTrainer:
    def __init__(self, model, cfg=CFG):
        self.model = model
        self.cfg = cfg
        self.reducer = OverlappedReducer(model)

    def micro_batches(self, batch):
        size = self.cfg.micro_batch
        pieces = {name: tensor.split(size) for name, tensor in batch.items()}
        count = len(next(iter(pieces.values())))
        return [{name: parts[i] for name, parts in pieces.items()} for i in range(count)]

    def train_step(self, batch):
        micro_batches = self.micro_batches(batch)
        total = 0.0
        for micro in micro_batches:
            loss = spotting_loss(self.model, micro) / len(micro_batches)
            loss.backward()
            self.reducer.wait()
            total += loss.item()
        self.reducer.finish()
        return total


def make_batch(generator):
    return {
        "spectrogram": torch.randn(12, CFG.bands, CFG.frames, generator=generator),
        "keyword": torch.randint(CFG.keywords, (12,), generator=generator),
    }


case = Case(model=KeywordNet, batch=make_batch, loss=spotting_loss, layout="1x2")


def step(model, shard, rank):
    trainer = AccumulatingTrainer(model)
    trainer.train_step(shard)
    trainer.reducer.detach()
