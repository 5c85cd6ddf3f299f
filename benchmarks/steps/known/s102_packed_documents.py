"""Documents of different lengths are packed into one row without padding."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

VOCAB, WIDTH, LONGEST = 10, 8, 9
IGNORE = -100


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        query, key, value = self.attention_in(x).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(torch.tanh(x + mixed))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    positions = torch.arange(LONGEST, device=batch["tokens"].device)
    logits = model(batch["tokens"], positions, positions[:, None] >= positions)[:, :-1]
    inside = positions[1:] < batch["lengths"][:, None]
    targets = batch["tokens"][:, 1:].masked_fill(~inside, IGNORE)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(0, VOCAB, (12, LONGEST), generator=generator),
        "lengths": torch.randint(2, LONGEST + 1, (12,), generator=generator),
    }


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="1x2")


@dataclass
class Packed:
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    document: Tensor

    @property
    def mask(self) -> Tensor:
        order = torch.arange(len(self.tokens), device=self.tokens.device)
        return (order[:, None] >= order) & (self.document[:, None] == self.document)


def pack(batch: dict[str, Tensor]) -> Packed:
    """All tokens that are no padding, one document after the other."""
    inside = torch.arange(LONGEST, device=batch["lengths"].device) < batch["lengths"][:, None]
    document, positions = inside.nonzero(as_tuple=True)
    tokens = batch["tokens"][inside]
    targets = tokens.roll(-1)
    targets[-1] = IGNORE
    return Packed(tokens, targets, positions, document)


def packed_loss(model: nn.Module, packed: Packed, world_size: int) -> Tensor:
    logits = model(packed.tokens[None], packed.positions, packed.mask).squeeze(0)
    total = F.cross_entropy(logits, packed.targets, ignore_index=IGNORE, reduction="sum")
    count = (packed.targets != IGNORE).sum()
    dist.all_reduce(count)
    return total * world_size / count


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    packed_loss(ddp, pack(shard), rank.world_size).backward()
