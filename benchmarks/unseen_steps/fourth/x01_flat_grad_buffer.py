"""Pre-training step of a small language model whose gradients live in one contiguous buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 23, 12, 7


@dataclass(frozen=True)
class TrainConfig:
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    micro_batches: int = 2


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.mixer(self.tokens(tokens))
        return self.head(self.norm(hidden))


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"tokens": torch.randint(VOCAB, (12, LENGTH), generator=generator)}


class FlatGradients:
    """One buffer for all gradients, so that a step needs a single collective."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        total = sum(p.numel() for p in parameters)
        self.buffer = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        offset = 0
        for parameter in parameters:
            view = self.buffer[offset : offset + parameter.numel()]
            parameter.grad = view.view_as(parameter)
            offset += parameter.numel()

    def average(self, world_size: int) -> None:
        self.buffer.div_(world_size)
        dist.all_reduce(self.buffer)


class Pretrainer:
    def __init__(self, model: nn.Module, world_size: int, config: TrainConfig) -> None:
        self.model = model
        self.world_size = world_size
        self.config = config
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.gradients = FlatGradients(parameters)
        self.optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def micro_batches(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        chunks = batch["tokens"].chunk(self.config.micro_batches)
        return [{"tokens": chunk} for chunk in chunks]

    def train_step(self, batch: dict[str, Tensor]) -> float:
        self.model.train()
        self.optimizer.zero_grad()
        total = 0.0
        for micro_batch in self.micro_batches(batch):
            loss = next_token_loss(self.model, micro_batch) / self.config.micro_batches
            loss.backward()
            total += loss.item()
        self.gradients.average(self.world_size)
        self.optimizer.step()
        return total


case = Case(model=TinyLM, batch=make_batch, loss=next_token_loss, layout="1x3")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    trainer = Pretrainer(model, rank.world_size, TrainConfig())
    trainer.train_step(shard)
