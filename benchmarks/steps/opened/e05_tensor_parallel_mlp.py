"""Megatron-style tensor parallelism inside a node, data parallelism between nodes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, HIDDEN, CLASSES, EXAMPLES = 6, 12, 5, 16

Batch = dict[str, Tensor]


class ReduceForward(torch.autograd.Function):
    """Megatron's g: sums in the forward, passes the gradient through."""

    @staticmethod
    def forward(ctx, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ReduceBackward(torch.autograd.Function):
    """Megatron's f: passes the input through, sums the gradient in the backward."""

    @staticmethod
    def forward(ctx, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        states = torch.tanh(self.stem(rows))
        return self.head(torch.tanh(self.down(F.gelu(self.up(states)))))


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["rows"]), batch["labels"])


class Mesh:
    def __init__(self, tensor_parallel: int) -> None:
        self.size = tensor_parallel
        self.index, self.replica = dist.get_rank() % self.size, dist.get_rank() // self.size
        self.replicas = dist.get_world_size() // self.size
        for node in range(self.replicas):
            ranks = list(range(node * self.size, (node + 1) * self.size))
            group = dist.new_group(ranks)
            if node == self.replica:
                self.group = group


class TensorParallelMLP:
    """Computes with this rank's slice of the hidden units."""

    def __init__(self, model: Classifier, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        width = HIDDEN // mesh.size
        self.mine = slice(mesh.index * width, (mesh.index + 1) * width)

    def __call__(self, rows: Tensor) -> Tensor:
        model = self.model
        states = ReduceBackward.apply(torch.tanh(model.stem(rows)), self.mesh.group)
        hidden = F.gelu(F.linear(states, model.up.weight[self.mine], model.up.bias[self.mine]))
        partial = F.linear(hidden, model.down.weight[:, self.mine], model.down.bias)
        states = torch.tanh(ReduceForward.apply(partial, self.mesh.group))
        return model.head(states)


def sync_gradients(model: Classifier, mesh: Mesh) -> None:
    """Slices are added up within the node; all is averaged between nodes."""
    sliced = {"up.weight", "up.bias", "down.weight"}
    for name, param in model.named_parameters():
        copies = 1 if name in sliced else mesh.size
        dist.all_reduce(param.grad)
        param.grad.div_(mesh.replicas * copies)


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="2x2", shards="own")


def step(model: nn.Module, batch: Batch, rank) -> None:
    mesh = Mesh(tensor_parallel=2)
    mine = {name: leaf.chunk(mesh.replicas)[mesh.replica] for name, leaf in batch.items()}
    logits = TensorParallelMLP(model, mesh)(mine["rows"])
    F.cross_entropy(logits, mine["labels"]).backward()
    sync_gradients(model, mesh)
