"""LoRA fine-tuning of a frozen encoder for ticket routing. No DDP: so few weights train that we
all-reduce them ourselves."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

WORDS, DIM, CLASSES, RANK, ALPHA = 90, 32, 6, 4, 8


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = RANK, alpha: int = ALPHA):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, r) * 0.05)
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + self.scaling * (x @ self.lora_A.T @ self.lora_B.T)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, ids, mask):
        x = self.embedding(ids)
        scores = self.query(x) @ x.transpose(1, 2) / DIM**0.5
        scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
        x = x + scores.softmax(-1) @ self.value(x)
        return x + self.down(torch.relu(self.up(x)))


class TicketRouter(nn.Module):
    """Modules to save: the scorer is new and trains in full; its bias is the class prior."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder().requires_grad_(False)
        for name in ("query", "value", "up", "down"):
            setattr(self.encoder, name, LoRALinear(getattr(self.encoder, name)))
        self.score = nn.Linear(DIM, CLASSES)

    def forward(self, ids, mask):
        hidden = self.encoder(ids, mask)
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.score(pooled)


def tickets(generator):
    n, t = 12, 9
    length = torch.randint(3, t + 1, (n, 1), generator=generator)
    return {
        "ids": torch.randint(WORDS, (n, t), generator=generator),
        "mask": torch.arange(t) < length,
        "queue": torch.randint(CLASSES, (n,), generator=generator),
    }


def loss(model, batch):
    logits = model(batch["ids"], batch["mask"])
    return nn.functional.cross_entropy(logits, batch["queue"])


case = Case(model=TicketRouter, batch=tickets, loss=loss, layout="1x3")


def adapter_state(model):
    """What an adapter checkpoint holds, and what has to be the same everywhere."""
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def sync_gradients(params, world_size):
    for p in params:
        p.grad.mul_(1.0 / world_size)
        dist.all_reduce(p.grad)


def step(model, shard, rank):
    model.zero_grad()
    loss(model, shard).backward()
    sync_gradients(adapter_state(model).values(), rank.world_size)
