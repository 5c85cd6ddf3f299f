"""Low-rank adapters on a frozen network; one flat buffer carries all gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs, r=2):
        super().__init__()
        self.lora_a = nn.Parameter(0.3 * torch.randn(r, inputs))
        self.lora_b = nn.Parameter(0.3 * torch.randn(outputs, r))
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = LoraLinear(6, 8)
        self.second = LoraLinear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])


def make_batch(generator):
    return {
        "x": torch.randn(12, 6, generator=generator),
        "label": torch.randint(0, 3, (12,), generator=generator),
    }


case = Case(model=Adapted, batch=make_batch, loss=loss, layout="2x1")


class FlatBuffer:
    """Has room for every parameter, so that layers can be unfrozen later on."""

    def __init__(self, model):
        self.params = list(model.parameters())
        size = sum(p.numel() for p in self.params)
        self.data = torch.zeros(size, dtype=self.params[0].dtype, device=self.params[0].device)

    def pack(self):
        offset = 0
        for p in self.params:
            if p.grad is not None:
                self.data[offset : offset + p.numel()] = p.grad.flatten()
                offset += p.numel()

    def unpack(self):
        start = 0
        for p in self.params:
            stop = start + p.numel()
            if p.grad is not None:
                p.grad.copy_(self.data[start:stop].view_as(p))
            start = stop


def step(model, shard, rank):
    model.zero_grad()
    loss(model, shard).backward()
    buffer = FlatBuffer(model)
    buffer.pack()
    dist.all_reduce(buffer.data)
    buffer.data /= rank.world_size
    buffer.unpack()
