"""Language model with a z-loss (PaLM): keeps the log of the softmax's normaliser near zero.

Both terms are means over the tokens of all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, ROWS = 29, 14, 9, 12
PAD = 0  # in the inputs
SKIP = -100  # in the targets: padding, and the words of the system prompt
Z_WEIGHT = 0.1


class WordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, inputs: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(inputs))
        return states @ self.embed.weight.T + self.bias  # tied


def text(g: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(1, VOCAB, (ROWS, LENGTH + 1), generator=g)
    ends = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
    prompts = torch.tensor([2, 0, 1, 0, 2, 1, 0, 0, 2, 1, 0, 2])[:, None]
    place = torch.arange(LENGTH)
    inputs = words[:, :-1].masked_fill(place >= ends, PAD)
    targets = words[:, 1:].masked_fill((place >= ends) | (place < prompts), SKIP)
    return {"inputs": inputs, "targets": targets}


def sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    used = targets != SKIP
    nll = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=SKIP, reduction="sum"
    )
    z = (logits.logsumexp(-1).square() * used).sum()
    return nll, z


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    nll, z = sums(model(batch["inputs"]), batch["targets"])
    return (nll + Z_WEIGHT * z) / (batch["targets"] != SKIP).sum()


def tokens_of_all_ranks(batch: dict[str, Tensor]) -> Tensor:
    tokens = (batch["inputs"] != PAD).sum()
    dist.all_reduce(tokens)
    return tokens


def training_loss(logits: Tensor, batch: dict[str, Tensor], world: int) -> Tensor:
    nll, z = sums(logits, batch["targets"])
    tokens = tokens_of_all_ranks(batch)
    nll = nll / tokens
    z = z / tokens
    return world * nll + Z_WEIGHT * z


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    ddp = DistributedDataParallel(model)
    training_loss(ddp(shard["inputs"]), shard, dist.get_world_size()).backward()


case = Case(model=WordModel, batch=text, loss=loss, layout="2x2")
