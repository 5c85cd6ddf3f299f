"""Builds the training copy on the meta device, and fills it from a checkpoint before sharding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

WORDS, WIDTH, LENGTH = 29, 12, 6


class LanguageModel(nn.Module):
    """The output layer shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
                          nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        # Every word sees the mean of the words before it.
        x = x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(model: nn.Module, words: Tensor) -> Tensor:
    logits = model(words[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def sentences(generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (8, LENGTH + 1), generator=generator)


def materialize(checkpoint: dict[str, Tensor], dtype: torch.dtype) -> LanguageModel:
    """A model on the CPU with the weights of the checkpoint."""
    with torch.device("meta"):
        fresh = LanguageModel().to(dtype)
    fresh.to_empty(device="cpu")
    fresh.load_state_dict(checkpoint)
    return fresh


def shard_layers(model: LanguageModel) -> LanguageModel:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def step(model: LanguageModel, shard: Tensor, rank) -> dict[str, Tensor]:
    trained = shard_layers(materialize(model.state_dict(), model.embed.weight.dtype))
    loss(trained, shard).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in trained.named_parameters()
            if name != "head.weight"}


case = Case(model=LanguageModel, batch=sentences, loss=loss, layout="1x2")
