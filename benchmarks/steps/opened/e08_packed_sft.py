"""Supervised fine-tuning on packed rows: each rank joins its conversations into one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, LONGEST, EXAMPLES, WIDTH = 29, 8, 16, 10
IGNORED = -100

Batch = dict[str, Tensor]


@dataclass
class PackedRow:
    ids: Tensor  # (1, tokens)
    labels: Tensor  # (1, tokens)
    positions: Tensor  # (1, tokens), from 0 in every conversation
    documents: Tensor  # (1, tokens), the number of the conversation


class ChatModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        states = self.embed(ids) + self.position(positions)
        query, key, value = self.qkv(states).chunk(3, dim=-1)
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=same & causal)
        return self.head(torch.tanh(states + mixed))


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "ids": torch.randint(VOCAB, (EXAMPLES, LONGEST), generator=generator),
        "lengths": torch.randint(4, LONGEST + 1, (EXAMPLES,), generator=generator),
        "prompts": torch.randint(0, 3, (EXAMPLES,), generator=generator),
    }


def next_token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy, and the number of tokens in it."""
    targets = labels[:, 1:]
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (targets != IGNORED).sum()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """One conversation per row, with padding on the right."""
    ids, column = batch["ids"], torch.arange(LONGEST).expand(EXAMPLES, -1)
    trained = (column >= batch["prompts"].unsqueeze(1)) & (column < batch["lengths"].unsqueeze(1))
    logits = model(ids, column, torch.zeros_like(ids))
    total, count = next_token_loss(logits, ids.masked_fill(~trained, IGNORED))
    return total / count


class PackingCollator:
    def conversation(self, ids: Tensor, length: int, prompt: int, number: int) -> PackedRow:
        ids = ids[:length]
        labels = ids.clone()
        labels[:prompt] = IGNORED
        return PackedRow(ids, labels, torch.arange(length), torch.full((length,), number))

    def __call__(self, batch: Batch) -> PackedRow:
        parts = [
            self.conversation(ids, int(length), int(prompt), number)
            for number, (ids, length, prompt) in enumerate(
                zip(batch["ids"], batch["lengths"], batch["prompts"], strict=True)
            )
        ]
        fields = ("ids", "labels", "positions", "documents")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in fields}
        return PackedRow(**{name: leaf.unsqueeze(0) for name, leaf in joined.items()})


class SFTTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = DistributedDataParallel(model)
        self.collate = PackingCollator()

    def step(self, batch: Batch) -> None:
        row = self.collate(batch)
        logits = self.model(row.ids, row.positions, row.documents)
        total, count = next_token_loss(logits, row.labels)
        dist.all_reduce(count)
        (total * dist.get_world_size() / count).backward()


case = Case(model=ChatModel, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    SFTTrainer(model).step(shard)
