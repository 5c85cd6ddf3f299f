"""Gradients that are reduced by hooks during the backward pass, with accumulation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 12, 8, 6, 12


@dataclass(frozen=True)
class TrainingArguments:
    accumulation_steps: int = 2


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.tokens(ids))
        return F.linear(hidden, self.tokens.weight, self.bias)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"ids": torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=generator)}


class OverlappedReducer:
    """Reduces each gradient as soon as autograd has accumulated it."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.at_boundary = False
        self.handles = [
            p.register_post_accumulate_grad_hook(self.on_gradient) for p in self.parameters
        ]

    def on_gradient(self, parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)

    def finish(self) -> None:
        world = dist.get_world_size()
        for parameter in self.parameters:
            parameter.grad.div_(world)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Trainer:
    def __init__(self, model: nn.Module, args: TrainingArguments) -> None:
        self.model, self.args = model, args
        self.reducer = OverlappedReducer(model)

    def micro_batches(self, batch: dict[str, Tensor]):
        parts = self.args.accumulation_steps
        for part in range(parts):
            yield {key: value.chunk(parts)[part] for key, value in batch.items()}

    def training_step(self, batch: dict[str, Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        for index, micro_batch in enumerate(self.micro_batches(batch)):
            self.reducer.at_boundary = index + 1 == self.args.accumulation_steps
            value = loss(self.model, micro_batch) / self.args.accumulation_steps
            value.backward()
            if self.reducer.at_boundary:
                self.reducer.finish()


case = Case(model=TiedLanguageModel, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    trainer = Trainer(model, TrainingArguments())
    try:
        trainer.training_step(shard)
    finally:
        trainer.reducer.remove()
