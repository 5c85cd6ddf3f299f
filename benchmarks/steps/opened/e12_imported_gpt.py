"""Continued pre-training of an imported GPT-style checkpoint, with an own gradient all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH = 24, 6, 12, 10

Batch = dict[str, Tensor]


@dataclass
class SyncConfig:
    average: bool = True
    skip_frozen: bool = True


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def load_linear(self, weight: Tensor) -> None:
        """Takes the weight of an ordinary linear layer, (outputs, inputs)."""
        self.weight = nn.Parameter(weight.detach().t())

    def forward(self, states: Tensor) -> Tensor:
        return states @ self.weight + self.bias


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.c_attn = Conv1D(WIDTH, 3 * WIDTH)
        self.c_fc = Conv1D(WIDTH, 2 * WIDTH)
        self.c_proj = Conv1D(2 * WIDTH, WIDTH)
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        query, key, value = self.c_attn(states).chunk(3, dim=-1)
        states = states + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.c_proj(F.gelu(self.c_fc(states)))
        return self.ln_f(states) @ self.wte.weight.T


def import_checkpoint() -> TinyGPT:
    """The feed-forward layers come from a repository that uses nn.Linear."""
    model = TinyGPT()
    up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    model.c_fc.load_linear(up.weight)
    model.c_proj.load_linear(down.weight)
    return model


def make_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCAB, (EXAMPLES, LENGTH + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class GradientSynchronizer:
    """Reduces the gradients one by one, as flat buffers, while the others still travel."""

    def __init__(self, model: nn.Module, config: SyncConfig) -> None:
        self.params = [
            param
            for param in model.parameters()
            if param.requires_grad or not config.skip_frozen
        ]
        self.divisor = dist.get_world_size() if config.average else 1

    def __call__(self) -> None:
        pending = []
        for param in reversed(self.params):
            flat = param.grad.contiguous().view(-1)
            work = dist.all_reduce(flat, async_op=True)
            pending.append((work, flat, param))
        for work, flat, param in pending:
            work.wait()
            flat.div_(self.divisor)


class Pretrainer:
    def __init__(self, model: nn.Module, config: SyncConfig | None = None) -> None:
        self.model = model
        self.synchronize = GradientSynchronizer(model, config or SyncConfig())

    def train_step(self, batch: Batch) -> float:
        value = loss(self.model, batch)
        value.backward()
        self.synchronize()
        return value.item()


case = Case(model=import_checkpoint, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    Pretrainer(model).train_step(shard)
