"""Pretraining from one long file of tokens, which every rank reads in strides of its own."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB = 13
BLOCK = 6
ROWS_PER_RANK = 2
TOTAL_ROWS = 24


class TinyLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 8)
        self.places = nn.Embedding(BLOCK, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        before = x.cumsum(dim=1) / torch.arange(1, BLOCK + 1, device=x.device)[:, None]
        return self.head(self.norm(x + self.mlp(before)))


def block_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return block_loss(model, batch["rows"][:, :-1], batch["rows"][:, 1:])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"rows": torch.randint(0, VOCAB, (TOTAL_ROWS, BLOCK + 1), generator=generator)}


case = Case(model=TinyLanguageModel, batch=make_batch, loss=loss, layout="1x4", shards="own")


class TokenReader:
    """Serves rows of a file; at any time the ranks read next to each other."""

    def __init__(self, file: Tensor, rows: int, rank: int, world_size: int) -> None:
        self.file = file
        self.rows = rows
        self.rank = rank
        self.world_size = world_size
        self.size = rows * (BLOCK + 1)
        self.position = self.size * rank

    def next_batch(self) -> tuple[Tensor, Tensor]:
        window = self.file[self.position : self.position + self.size]
        window = window.view(self.rows, BLOCK + 1)
        self.position += self.size
        if self.position + self.size > len(self.file):
            self.position = self.size * self.rank
        return window[:, :-1], window[:, 1:]


class Pretrainer:
    def __init__(self, model: nn.Module, reader: TokenReader, total_rows: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.reader = reader
        self.micro_steps = total_rows // (reader.rows * reader.world_size)

    def optimizer_step(self) -> None:
        for micro_step in range(self.micro_steps):
            x, y = self.reader.next_batch()
            last = micro_step == self.micro_steps - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                (block_loss(self.ddp, x, y) / self.micro_steps).backward()


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    reader = TokenReader(batch["rows"].flatten(), ROWS_PER_RANK, rank.rank, rank.world_size)
    Pretrainer(model, reader, len(batch["rows"])).optimizer_step()
