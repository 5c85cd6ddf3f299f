"""Prompt tuning on top of a small backbone: the prompt stays whole, the backbone is sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case, Rank


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        return x + self.out(weights @ value)


class Prompt(nn.Module):
    """Learned positions that are put before every sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.5 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.positions.expand(len(x), -1, -1), x], dim=1)


class PromptedModel(nn.Module):
    def __init__(self, width: int = 12, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, width)
        self.prompt = Prompt(3, width)
        self.layers = nn.ModuleList([Attend(width), Attend(width)])
        self.classify = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.prompt(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.classify(x.mean(1))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(23, (12, 5), generator=generator),
        "labels": torch.randint(4, (12,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])


def shard_backbone(model: PromptedModel, rank: Rank) -> FSDP:
    """The prompt is saved and swapped by itself, and is not worth an all-gather."""
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Attend}),
        ignored_states=[model.prompt.positions],
        use_orig_params=True,
        device_id=rank.device,
    )


def step(model: PromptedModel, shard: dict[str, Tensor], rank: Rank) -> dict[str, Tensor]:
    fsdp = shard_backbone(model, rank)
    loss(fsdp, shard).backward()
    gradients = {"prompt.positions": model.prompt.positions.grad.clone()}
    with FSDP.summon_full_params(fsdp, with_grads=True):
        for name, parameter in fsdp.named_parameters():
            plain = name.replace("_fsdp_wrapped_module.", "")
            if plain not in gradients:
                gradients[plain] = parameter.grad.clone()
    return gradients


case = Case(model=PromptedModel, batch=batch, loss=loss, layout="1x2")
