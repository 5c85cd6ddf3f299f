"""ZeRO-like training by hand: every gradient is reduced to one rank, which owns its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH, RANK = 26, 5, 12, 8, 3

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class LoraConfig:
    rank: int = RANK
    alpha: float = 6.0


class LoraLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, config: LoraConfig) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(0.5 * torch.randn(config.rank, inputs))
        self.up = nn.Parameter(0.5 * torch.randn(outputs, config.rank))
        self.scaling = config.alpha / config.rank

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.scaling * (states @ self.down.T @ self.up.T)


class LoraLM(nn.Module):
    def __init__(self, config: LoraConfig | None = None) -> None:
        super().__init__()
        config = config or LoraConfig()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.embed.requires_grad_(False)
        self.mix = LoraLinear(2 * WIDTH, WIDTH, config)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = LoraLinear(WIDTH, VOCAB, config)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        past = states.cumsum(dim=1) / torch.arange(1, ids.shape[1] + 1).unsqueeze(1)
        return self.head(self.norm(torch.tanh(self.mix(torch.cat([states, past], dim=-1)))))


def make_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCAB, (EXAMPLES, LENGTH + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


class ShardedGradients:
    """Deals the parameters to the ranks in turn, as in ZeRO-2 with one bucket per tensor."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.trainable = [param for param in model.parameters() if param.requires_grad]

    def owner(self, index: int) -> int:
        return index % self.size

    def reduce(self) -> None:
        for index, param in enumerate(self.trainable):
            owner = self.owner(index)
            dist.reduce(param.grad, dst=owner)
            if owner == self.rank:
                param.grad /= self.size

    def gather(self) -> None:
        """Before a checkpoint, or for the gradient norm, every rank gets what the owners hold."""
        for index, (name, param) in enumerate(self.model.named_parameters()):
            if not param.requires_grad:
                continue
            try:
                dist.broadcast(param.grad, src=self.owner(index))
            except RuntimeError as error:
                raise RuntimeError(f"could not gather the gradient of {name}") from error


class LoraTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shards = ShardedGradients(model)

    def train_step(self, batch: Batch) -> float:
        value = loss(self.model, batch)
        value.backward()
        self.shards.reduce()
        self.shards.gather()
        return value.item()


case = Case(model=LoraLM, batch=make_batch, loss=loss, layout="1x3")


def step(model: nn.Module, shard: Batch, rank) -> None:
    LoraTrainer(model).train_step(shard)
