"""An encoder that applies one block several times, with activation checkpointing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

VOCABULARY, WIDTH, LENGTH, CLASSES, EXAMPLES = 15, 8, 5, 3, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.feed(x)


class SharedEncoder(nn.Module):
    """Cross-layer parameter sharing: the same block at every depth."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.classifier = nn.Linear(WIDTH, CLASSES)
        self.depth = depth
        self.checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        self.checkpointing = True

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(self.depth):
            if self.checkpointing:
                x = checkpoint(self.block, x, use_reentrant=True)
            else:
                x = self.block(x)
        return self.classifier(x.mean(1))


class EagerAllReduce:
    """Averages gradients from hooks, while the backward pass goes on."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {p: name for name, p in model.named_parameters()}
        self.finished: set[str] = set()
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self.hook)

    def start(self) -> None:
        self.finished.clear()

    def hook(self, parameter: Tensor) -> None:
        name = self.names[parameter]
        if name in self.finished:
            return
        parameter.grad.div_(dist.get_world_size())
        dist.all_reduce(parameter.grad)
        self.finished.add(name)

    def check_complete(self) -> None:
        missing = set(self.names.values()) - self.finished
        if missing:
            raise RuntimeError(f"no gradient for {sorted(missing)}")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "ids": torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


class Trainer:
    def __init__(self, model: SharedEncoder) -> None:
        model.gradient_checkpointing_enable()
        self.model = model
        self.reducer = EagerAllReduce(model)

    def training_step(self, batch: dict[str, Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        self.reducer.start()
        loss(self.model, batch).backward()
        self.reducer.check_complete()


case = Case(model=SharedEncoder, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    Trainer(model).training_step(shard)
