"""Sequential recommendation: the output layer scores items with the very table that embeds them."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

ITEMS, LENGTH, WIDTH = 13, 6, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 19), nn.ReLU(), nn.Linear(19, WIDTH))

    def forward(self, x: Tensor, causal: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, attn_mask=causal, need_weights=False)
        x = self.norm(x + y)
        return x + self.feed(x)


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.scores = nn.Linear(WIDTH, ITEMS, bias=False)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("causal", causal)
        self.tie()

    def tie(self) -> None:
        self.scores.weight = self.items.weight

    def forward(self, history: Tensor) -> Tensor:
        x = self.items(history) + self.place.weight
        for layer in self.layers:
            x = layer(x, self.causal)
        return self.scores(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["history"])
    return F.cross_entropy(scores.flatten(0, 1), batch["next"].flatten())


def histories(generator: torch.Generator) -> dict[str, Tensor]:
    items = torch.randint(ITEMS, (10, LENGTH + 1), generator=generator)
    return {"history": items[:, :-1], "next": items[:, 1:]}


def materialise(model: Recommender) -> Recommender:
    """A copy that was never whole in memory twice: made without storage, then filled."""
    with torch.device("meta"):
        copy = Recommender()
    copy.to(model.place.weight.dtype)
    copy.to_empty(device="cpu")
    copy.load_state_dict(model.state_dict())
    return copy


def shard_recommender(model: Recommender) -> Recommender:
    for layer in model.layers:
        fully_shard(layer)
    # Table and scores stay in the group of the root, which is gathered for the whole step.
    return fully_shard(model, reshard_after_forward=False)


def step(model, shard, rank):
    sharded = shard_recommender(materialise(model))
    loss(sharded, shard).backward()
    return {
        name: sharded.get_parameter(name).grad.full_tensor() for name, _ in model.named_parameters()
    }


case = Case(model=Recommender, batch=histories, loss=loss, layout="1x2")
