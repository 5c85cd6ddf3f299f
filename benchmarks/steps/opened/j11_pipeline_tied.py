"""A pipeline of two stages on every node, with micro-batches, and nodes that are replicas.

The language model of protein-like sequences has one table for its first and its last layer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

RESIDUES, LENGTH, WIDTH, MICRO_BATCHES = 11, 7, 8, 2


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.along = nn.Linear(LENGTH, LENGTH)
        self.across = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.along(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + torch.tanh(self.across(x))


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(RESIDUES, WIDTH)
        self.early = Mixer()
        self.late = Mixer()
        self.final_norm = nn.LayerNorm(WIDTH)

    def first_stage(self, ids: Tensor) -> Tensor:
        return self.early(self.table(ids))

    def second_stage(self, hidden: Tensor) -> Tensor:
        return F.linear(self.final_norm(self.late(hidden)), self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.second_stage(self.first_stage(ids))


def fill_in(logits: Tensor, residues: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), residues.flatten())


def loss(model: nn.Module, batch: dict) -> Tensor:
    return fill_in(model(batch["seen"]), batch["true"])


def proteins(generator: torch.Generator) -> dict:
    true = torch.randint(1, RESIDUES, (16, LENGTH), generator=generator)
    masked = torch.rand(true.shape, generator=generator) < 0.3
    return {"seen": true.masked_fill(masked, 0), "true": true}


case = Case(model=TiedModel, batch=proteins, loss=loss, layout="2x2", shards="own")


class Pipeline:
    def __init__(self, model: TiedModel, rank):
        places = torch.arange(rank.world_size).view(rank.nodes, 2)
        pipes = [dist.new_group(row.tolist()) for row in places]
        stages = [dist.new_group(column.tolist()) for column in places.T]
        self.model, self.rank = model, rank
        self.pipe, self.replicas = pipes[rank.node], stages[rank.local_rank]
        self.first, self.second = places[rank.node].tolist()

    def run(self, batches: list[dict]) -> None:
        if self.rank.local_rank == 0:
            sent = [self.model.first_stage(part["seen"]) for part in batches]
            for hidden in sent:
                dist.send(hidden.detach(), dst=self.second)
            for hidden in sent:
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, src=self.second)
                hidden.backward(gradient)
            return
        for part in batches:
            hidden = torch.empty(*part["seen"].shape, WIDTH, dtype=self.model.table.weight.dtype)
            dist.recv(hidden, src=self.first)
            part["hidden"] = hidden.requires_grad_()
        for part in batches:
            logits = self.model.second_stage(part["hidden"])
            (fill_in(logits, part["true"]) / len(batches)).backward()
            dist.send(part["hidden"].grad, dst=self.first)

    def share_gradients(self) -> None:
        """Average over the replicas of a stage; then every rank gets the gradients of all stages."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.replicas)
            parameter.grad /= self.rank.nodes
            owner = self.first if name.startswith(("table", "early")) else self.second
            dist.broadcast(parameter.grad, src=owner, group=self.pipe)


def step(model: TiedModel, batch: dict, rank) -> None:
    mine = {name: tensor.chunk(rank.nodes)[rank.node] for name, tensor in batch.items()}
    parts = zip(mine["seen"].chunk(MICRO_BATCHES), mine["true"].chunk(MICRO_BATCHES))
    pipeline = Pipeline(model, rank)
    pipeline.run([{"seen": seen, "true": true} for seen, true in parts])
    pipeline.share_gradients()
