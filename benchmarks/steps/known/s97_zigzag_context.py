"""Context parallelism: every rank has an early and a late chunk of all sequences."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB, WIDTH, LENGTH = 12, 8, 16
Gather = Callable[[Tensor], Tensor]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, gather: Gather) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions.to(tokens.device))
        keys, values = gather(self.key_value(x)).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(self.query(x), keys, values, attn_mask=mask)
        return self.head(x + mixed)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    positions = torch.arange(LENGTH, device=batch["tokens"].device)
    mask = positions[:, None] >= positions
    logits = model(batch["tokens"], positions, mask, lambda local: local)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="1x2", shards="own")


class ContextParallel:
    """Chunk r and its mirror image go to rank r, so that all ranks attend to equally much."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank.rank
        self.world_size = rank.world_size

    def places_of(self, rank: int) -> Tensor:
        chunks = torch.arange(LENGTH).chunk(2 * self.world_size)
        return torch.cat([chunks[rank], chunks[2 * self.world_size - 1 - rank]])

    def gather(self, local: Tensor) -> Tensor:
        return torch.cat(all_gather(local.contiguous()), dim=1)

    def mask(self) -> Tensor:
        """What the rank's tokens may see of the gathered keys."""
        keys = torch.cat([self.places_of(rank) for rank in range(self.world_size)])
        return self.places_of(self.rank)[:, None] >= keys

    def positions(self) -> Tensor:
        size = LENGTH // self.world_size
        return torch.arange(self.rank * size, (self.rank + 1) * size)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    parallel = ContextParallel(rank)
    ddp = DistributedDataParallel(model)
    places = parallel.places_of(rank.rank)
    tokens, targets = shard["tokens"][:, places], shard["targets"][:, places]
    logits = ddp(tokens, parallel.positions(), parallel.mask().to(tokens.device), parallel.gather)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
