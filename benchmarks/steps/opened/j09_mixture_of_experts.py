"""A switch transformer layer: one expert per token, and a loss that keeps the experts evenly busy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

WIDTH, EXPERTS, TOKENS, VOCABULARY = 8, 4, 6, 15


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.gate(tokens).softmax(dim=-1)
        return chances, chances.argmax(dim=-1)


class SwitchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chances, chosen = self.router(tokens)
        one_hot = F.one_hot(chosen, EXPERTS).to(tokens)
        hidden = torch.einsum("btw,ewh->bteh", tokens, self.up).relu()
        each = torch.einsum("bteh,ehw->btew", hidden, self.down)
        mixed = (each * (one_hot * chances).unsqueeze(-1)).sum(dim=2)
        return tokens + mixed, chances, one_hot


class TinySwitch(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = SwitchLayer()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor):
        tokens, chances, one_hot = self.layer(self.embed(ids))
        return self.head(self.norm(tokens)), chances, one_hot


def busy(load: Tensor, chances: Tensor) -> Tensor:
    """As in the switch transformer: experts * sum of (share of tokens * mean probability)."""
    return EXPERTS * (load * chances.flatten(0, 1).mean(dim=0)).sum()


def share(one_hot: Tensor) -> Tensor:
    return one_hot.flatten(0, 1).mean(dim=0)


def language(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model: nn.Module, batch: dict) -> Tensor:
    logits, chances, one_hot = model(batch["ids"])
    return language(logits, batch["targets"]) + 0.5 * busy(share(one_hot), chances)


def text(generator: torch.Generator) -> dict:
    count = 8
    # The two halves come from two sources with other words.
    low = torch.randint(0, 8, (count // 2, TOKENS + 1), generator=generator)
    high = torch.randint(6, VOCABULARY, (count // 2, TOKENS + 1), generator=generator)
    ids = torch.cat([low, high])
    return {"ids": ids[:, :-1], "targets": ids[:, 1:]}


case = Case(model=TinySwitch, batch=text, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict, rank) -> None:
    ddp = DDP(model)
    logits, chances, one_hot = ddp(shard["ids"])
    routed = one_hot.sum(dim=(0, 1))
    seen = one_hot.new_tensor(float(one_hot.shape[0] * one_hot.shape[1]))
    for expert, tokens in enumerate(routed.tolist()):
        # What a dashboard would show of this step.
        ddp.register_buffer(f"load_of_expert_{expert}", torch.tensor(tokens), persistent=False)
    load = routed / seen
    total = language(logits, shard["targets"]) + 0.5 * busy(load, chances)
    total.backward()
