"""Hash-routed experts, one on each rank; the other layers are data-parallel."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

EXPERTS = 4
WIDTH = 6
VOCAB = 20


class HashedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        chosen = F.one_hot(tokens % EXPERTS, EXPERTS).to(hidden.dtype)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-1)
        return self.head(hidden + torch.tanh(outputs @ chosen.unsqueeze(-1)).squeeze(-1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(0, VOCAB, (32,), generator=generator),
        "labels": torch.randint(0, 3, (32,), generator=generator),
    }


case = Case(model=HashedExperts, batch=make_batch, loss=loss, layout="1x4")


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.apply(grad, ctx.received, ctx.sent), None, None


def routed(model: HashedExperts, tokens: Tensor, rank: Rank) -> Tensor:
    hidden = model.embed(tokens)
    target = tokens % EXPERTS
    order = target.argsort(stable=True)
    sent = torch.bincount(target, minlength=EXPERTS)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    inbox = AllToAll.apply(hidden[order], sent.tolist(), received.tolist())
    outbox = torch.tanh(model.experts[rank.rank](inbox))
    returned = AllToAll.apply(outbox, received.tolist(), sent.tolist())
    return model.head(hidden + returned[order.argsort()])


def reduce_gradients(model: HashedExperts, rank: Rank) -> None:
    dense = [*model.embed.parameters(), *model.head.parameters()]
    for p in dense:
        dist.all_reduce(p.grad)
        p.grad.div_(rank.world_size)
    for owner, expert in enumerate(model.experts):
        for p in expert.parameters():
            grad = p.grad if owner == rank.rank else torch.zeros_like(p)
            dist.broadcast(grad, src=owner)
            p.grad = grad


def step(model: HashedExperts, shard: dict[str, Tensor], rank: Rank) -> None:
    F.cross_entropy(routed(model, shard["tokens"], rank), shard["labels"]).backward()
    reduce_gradients(model, rank)
