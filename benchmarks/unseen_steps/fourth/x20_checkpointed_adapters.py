"""Parameter-efficient tuning of a frozen transformer with activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, BOTTLENECK = 16, 10, 5, 3


class AdaptedBlock(nn.Module):
    """A frozen block with an adapter behind it (Houlsby et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.adapter = nn.Sequential(
            nn.Linear(WIDTH, BOTTLENECK), nn.GELU(), nn.Linear(BOTTLENECK, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.adapter(hidden)


class AdaptedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.gradient_checkpointing = False
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name or name.startswith("head"))

    def enable_input_gradients(self) -> None:
        """Lets the frozen embedding's output ask for gradients."""
        self.embed.register_forward_hook(lambda module, inputs, output: output.requires_grad_())

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(block, hidden, use_reentrant=True)
            else:
                hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(VOCAB, (12, LENGTH), generator=generator),
        "labels": torch.randint(2, (12,), generator=generator),
    }


@dataclass(frozen=True)
class TuningArguments:
    gradient_checkpointing: bool = True
    gradient_accumulation_steps: int = 3


class AdapterTrainer:
    def __init__(self, model: AdaptedTransformer, arguments: TuningArguments) -> None:
        self.model = model.train()
        self.arguments = arguments
        self.prepare_model()

    def prepare_model(self) -> None:
        if self.arguments.gradient_checkpointing:
            self.model.gradient_checkpointing = True

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def accumulate(self, batch: dict[str, Tensor]) -> None:
        steps = self.arguments.gradient_accumulation_steps
        for tokens, labels in zip(
            batch["tokens"].chunk(steps), batch["labels"].chunk(steps), strict=True
        ):
            (loss(self.model, {"tokens": tokens, "labels": labels}) / steps).backward()

    def average(self, world_size: int) -> None:
        for parameter in self.trainable():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)


case = Case(model=AdaptedTransformer, batch=make_batch, loss=loss, layout="1x2")


def step(model: AdaptedTransformer, shard: dict[str, Tensor], rank) -> None:
    trainer = AdapterTrainer(model, TuningArguments())
    trainer.accumulate(shard)
    trainer.average(rank.world_size)
