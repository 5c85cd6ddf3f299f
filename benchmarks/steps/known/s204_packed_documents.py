"""A language model on rows into which several documents are packed.

Rows are trained on in small pieces. Gradients are sums over tokens until the end of the step, where
they are divided by the number of tokens that were predicted on all ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
VOCABULARY, LENGTH = 19, 10


class PackedModel(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        earlier = x.new_ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        seen = earlier & (document[:, :, None] == document[:, None, :])
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.head(torch.tanh(x + self.project(attended)))


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The summed loss of all tokens that follow a token of their document, and their number."""
    logits = model(batch["tokens"], batch["document"])[:, :-1]
    predicted = batch["document"][:, 1:] == batch["document"][:, :-1]
    summed = F.cross_entropy(logits[predicted], batch["tokens"][:, 1:][predicted], reduction="sum")
    return summed, predicted.sum()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    summed, count = token_loss(model, batch)
    return summed / count


def make_batch(generator: torch.Generator) -> Batch:
    starts = torch.rand(12, LENGTH, generator=generator) < 0.25
    return {
        "tokens": torch.randint(VOCABULARY, (12, LENGTH), generator=generator),
        "document": starts.long().cumsum(1),
    }


case = Case(model=PackedModel, batch=make_batch, loss=loss, layout="1x2")


class Window:
    """Adds up gradients and tokens of the pieces of one step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tokens = torch.zeros((), dtype=torch.long, device=next(model.parameters()).device)

    def add(self, piece: Batch) -> None:
        summed, count = token_loss(self.model, piece)
        summed.backward()
        self.tokens += count
        dist.all_reduce(self.tokens)

    def close(self) -> None:
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.tokens


def step(model: nn.Module, shard: Batch, rank: Rank, rows: int = 2) -> None:
    window = Window(model)
    tokens, documents = shard["tokens"].split(rows), shard["document"].split(rows)
    for some_tokens, some_documents in zip(tokens, documents, strict=True):
        window.add({"tokens": some_tokens, "document": some_documents})
    window.close()
