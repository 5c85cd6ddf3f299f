"""A character language model with a hand-written overlapping gradient reducer.
Gradients are collected into buckets while backward runs; full buckets are all-reduced asynchronously."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from ddp_equivalence import Case

CHARS, WIDTH, LENGTH = 21, 12, 8


class CharLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CHARS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.proj = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))
        self.head = nn.Linear(WIDTH, CHARS)

    def forward(self, chars):
        h, _ = self.lstm(self.embed(chars))
        return self.head(h + self.proj(h))


def build_model():
    return CharLM()


def nll(model, batch):
    text = batch["text"]
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def loss(model, batch):
    return nll(model, batch)


def make_batch(generator):
    return {"text": torch.randint(0, CHARS, (16, LENGTH + 1), generator=generator)}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class BucketReducer:
    def __init__(self, module, world_size, capacity=600):
        self.world_size = world_size
        self.capacity = capacity
        self.bucket, self.filled = [], 0
        self.in_flight = []
        self.handles = [
            p.register_post_accumulate_grad_hook(self._ready)
            for p in module.parameters()
            if p.requires_grad
        ]

    def _ready(self, param):
        self.bucket.append(param)
        self.filled += param.numel()
        if self.filled >= self.capacity:
            self._launch()

    def _launch(self):
        params, self.bucket, self.filled = self.bucket, [], 0
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        work = dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)
        self.in_flight.append((work, flat, params))

    def finalize(self):
        for work, flat, params in self.in_flight:
            work.wait()
            flat.div_(self.world_size)
            offset = 0
            for p in params:
                p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
        self.in_flight.clear()
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    reducer = BucketReducer(model, rank.world_size)
    train_loss = nll(model, shard)
    train_loss.backward()
    reducer.finalize()
    return
