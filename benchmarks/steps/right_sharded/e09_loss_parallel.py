"""2-D: sequence and loss parallelism inside of a node, fully_shard over nodes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ddp_equivalence import Case

VOCAB, DIM, HIDDEN, SEQ = 24, 8, 12, 6


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([MLP(), MLP()])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(generator):
    ids = torch.randint(0, VOCAB, (8, SEQ + 1), generator=generator)
    return {"inputs": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}


def loss(model, batch):
    return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())


def apply_tp(model, mesh):
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "norm": SequenceParallel(),
                "fc1": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
            },
        )
        parallelize_module(
            layer,
            mesh,
            {
                "fc1": ColwiseParallel(),
                "fc2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def step(model, batch, rank):
    mesh = init_device_mesh(
        "cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("dp", "tp")
    )
    apply_tp(model, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)

    part, parts = mesh["dp"].get_local_rank(), mesh["dp"].size()
    mine = {key: value[part::parts] for key, value in batch.items()}
    with loss_parallel():
        loss(model, mine).backward()


case = Case(model=LM, batch=batch, loss=loss, layout="2x2", shards="own")
