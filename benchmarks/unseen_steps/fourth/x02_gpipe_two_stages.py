"""GPipe with two stages by hand: all forwards, then all backwards, two pipelines side by side."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 19, 10, 5
STAGES = 2
MICRO_BATCHES = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class StagedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def first_stage(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).cumsum(dim=1)
        for block in self.blocks[:2]:
            hidden = block(hidden)
        return hidden

    def last_stage(self, hidden: Tensor) -> Tensor:
        for block in self.blocks[2:]:
            hidden = block(hidden)
        return self.head(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last_stage(self.first_stage(tokens))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_loss(model(batch["inputs"]), batch["targets"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (12, LENGTH + 1), generator=generator)
    return {"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}


class PipelineEngine:
    def __init__(self, model: StagedLM, rank) -> None:
        self.model = model
        self.stage = rank % STAGES
        self.replica = rank // STAGES
        self.replicas = rank.world_size // STAGES
        self.peer = rank + 1 if self.stage == 0 else rank - 1

    def micro_batches(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(self.replicas)[self.replica].chunk(MICRO_BATCHES))

    def run_first_stage(self, inputs: list[Tensor]) -> None:
        outputs = []
        for tokens in inputs:
            output = self.model.first_stage(tokens)
            dist.send(output.detach().contiguous(), self.peer)
            outputs.append(output)
        for output in outputs:
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.peer)
            output.backward(gradient)

    def run_last_stage(self, targets: list[Tensor]) -> None:
        in_flight = []
        for target in targets:
            hidden = torch.empty(*target.shape, WIDTH, dtype=self.model.head.weight.dtype)
            dist.recv(hidden, self.peer)
            hidden.requires_grad_()
            scaled = token_loss(self.model.last_stage(hidden), target) / MICRO_BATCHES
            in_flight.append((hidden, scaled))
        while in_flight:
            hidden, scaled = in_flight.pop()
            scaled.backward()
            dist.send(hidden.grad.contiguous(), self.peer)

    def reduce_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.replicas

    def train_batch(self, batch: dict[str, Tensor]) -> None:
        if self.stage == 0:
            self.run_first_stage(self.micro_batches(batch["inputs"]))
        else:
            self.run_last_stage(self.micro_batches(batch["targets"]))
        self.reduce_gradients()


case = Case(model=StagedLM, batch=make_batch, loss=loss, layout="2x2", shards="own")


def step(model: StagedLM, shard: dict[str, Tensor], rank) -> None:
    PipelineEngine(model, rank).train_batch(shard)
