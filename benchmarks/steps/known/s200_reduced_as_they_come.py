"""Each gradient is reduced as soon as it is complete, while the backward pass goes on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

VOCAB, WIDTH, MASK = 18, 8, 0


class MaskedModel(nn.Module):
    """Predicts hidden tokens. The decoder has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Sequential(
            nn.Conv1d(WIDTH, 12, 3, padding=1), nn.GELU(), nn.Conv1d(12, WIDTH, 3, padding=1)
        )
        self.decoder = nn.Linear(WIDTH, VOCAB)
        self.decoder.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.decoder(x + self.body(x.mT).mT)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["masked"]).mT, batch["tokens"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(1, VOCAB, (12, 8), generator=generator)
    hidden = torch.rand(12, 8, generator=generator) < 0.3
    return {"masked": tokens.masked_fill(hidden, MASK), "tokens": tokens}


case = Case(model=MaskedModel, batch=make_batch, loss=loss, layout="1x2")


class AsyncReducer:
    """Begins to add up a gradient over the ranks when it is there, and divides it at the end."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.world_size = world_size
        self.works: list[dist.Work] = []
        self.table = dict(model.named_parameters(remove_duplicate=False))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p: nn.Parameter) -> None:
        work = dist.all_reduce(p.grad, async_op=True)
        assert work is not None
        self.works.append(work)

    def finish(self) -> dict[str, float]:
        """Wait for all, and return the norm of each gradient for the log."""
        while self.works:
            self.works.pop().wait()
        norms = {}
        for name, p in self.table.items():
            p.grad.div_(self.world_size)
            norms[name] = float(p.grad.norm())
        return norms


class Trainer:
    """Trains, and remembers the norms of the last step."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.reducer = AsyncReducer(model, rank.world_size)
        self.norms: dict[str, float] = {}

    def train_step(self, batch: dict[str, Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        loss(self.model, batch).backward()
        self.norms = self.reducer.finish()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model, rank).train_step(shard)
