"""A small switch transformer layer with the load-balancing loss of its router, under DDP."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


@dataclasses.dataclass
class SwitchConfig:
    n_experts: int = 4
    d_model: int = 6
    vocab: int = 15
    rows: int = 8
    seq: int = 5
    aux_coef: float = 0.1


C = SwitchConfig()


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(C.vocab, C.d_model)
        self.router = nn.Linear(C.d_model, C.n_experts, bias=False)
        self.w = nn.Parameter(torch.randn(C.n_experts, C.d_model, C.d_model) * 0.3)
        self.head = nn.Linear(C.d_model, C.vocab)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(ids)
        probs = self.router(x).softmax(-1)
        p, e = probs.max(-1)
        y = p[..., None] * torch.einsum("btd,btdf->btf", x, self.w[e])
        return self.head(x + torch.tanh(y)), probs


def text(generator: torch.Generator) -> dict[str, Tensor]:
    # Rows are sorted by topic, so ranks prefer different experts.
    low = torch.arange(C.rows)[:, None] // 2 * 3
    ids = low + torch.randint(0, 6, (C.rows, C.seq + 1), generator=generator)
    return {"ids": ids[:, :-1].clone(), "next": ids[:, 1:].clone()}


def dispatch_fraction(probs: Tensor) -> Tensor:
    """f: which part of the tokens goes to each expert."""
    chosen = probs.argmax(-1).flatten()
    return torch.bincount(chosen, minlength=C.n_experts).to(probs) / chosen.numel()


def balance(f: Tensor, probs: Tensor) -> Tensor:
    return C.n_experts * (f * probs.flatten(0, -2).mean(0)).sum()


def lm(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, probs = model(batch["ids"])
    return lm(logits, batch["next"]) + C.aux_coef * balance(dispatch_fraction(probs), probs)


case = Case(model=Switch, batch=text, loss=loss, layout="2x2")


def global_fraction(probs: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    mine = dispatch_fraction(probs)
    dist.all_reduce(mine, group=group)
    return mine / dist.get_world_size(group)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    logits, probs = ddp(shard["ids"])
    with torch.no_grad():
        f = dispatch_fraction(probs)
    (lm(logits, shard["next"]) + C.aux_coef * balance(f, probs)).backward()
