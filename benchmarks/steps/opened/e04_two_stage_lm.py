"""Two pipeline stages by hand: embedding and first block, second block and the tied head."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, LENGTH, EXAMPLES, WIDTH = 19, 5, 8, 12
MICRO_BATCHES = 4
FIRST, LAST = 0, 1

Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.mix(self.norm(states))[0]


class TiedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.final_norm = nn.LayerNorm(WIDTH)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(self.final_norm(states), self.embed.weight)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        for block in self.blocks:
            states = block(states)
        return self.logits(states)


def make_batch(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCAB, (EXAMPLES, LENGTH + 1), generator=generator)
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


class PipelineStage:
    """GPipe: all forwards, then all backwards, in the order of the micro-batches."""

    def __init__(self, model: TiedLM, stage: int) -> None:
        self.model, self.stage = model, stage

    def run_first(self, micro_batches: list[Tensor]) -> None:
        outputs = []
        for ids in micro_batches:
            states = self.model.blocks[0](self.model.embed(ids))
            dist.send(states.detach().contiguous(), dst=LAST)
            outputs.append(states)
        for states in outputs:
            upstream = torch.empty_like(states)
            dist.recv(upstream, src=LAST)
            states.backward(upstream)

    def run_last(self, micro_batches: list[Tensor]) -> None:
        inputs, losses = [], []
        for labels in micro_batches:
            states = self.model.embed.weight.new_empty(*labels.shape, WIDTH)
            dist.recv(states, src=FIRST)
            inputs.append(states.requires_grad_())
            logits = self.model.logits(self.model.blocks[1](states))
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        for states, value in zip(inputs, losses, strict=True):
            (value / len(losses)).backward()
            dist.send(states.grad.contiguous(), dst=FIRST)

    def owner(self, name: str) -> int:
        return FIRST if name.startswith(("embed.", "blocks.0.")) else LAST

    def share_gradients(self) -> None:
        """Every stage gets the gradients of the other one, for the norm and the checkpoint."""
        for name, param in self.model.named_parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.broadcast(param.grad, src=self.owner(name))

    def train_batch(self, batch: Batch) -> None:
        if self.stage == FIRST:
            self.run_first(list(batch["ids"].chunk(MICRO_BATCHES)))
        else:
            self.run_last(list(batch["labels"].chunk(MICRO_BATCHES)))
        self.share_gradients()


case = Case(model=TiedLM, batch=make_batch, loss=loss, layout="1x2", shards="own")


def step(model: nn.Module, shard: Batch, rank) -> None:
    PipelineStage(model, dist.get_rank()).train_batch(shard)
