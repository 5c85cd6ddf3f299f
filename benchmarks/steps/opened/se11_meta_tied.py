"""Deferred initialisation: build on meta, fully_shard, to_empty, then load the weights by name."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ddp_equivalence import Case

VOCAB, DIM, SEQ = 23, 9, 6


def sinusoids():
    angles = torch.arange(SEQ)[:, None] / 50 ** (torch.arange(DIM) / DIM)
    return torch.cat([angles[:, ::2].sin(), angles[:, 1::2].cos()], dim=1)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.register_buffer("positions", sinusoids(), persistent=False)
        self.blocks = nn.ModuleList([Mixer(), Mixer()])
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        x = self.tok_embeddings(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def batch(generator):
    ids = torch.randint(0, VOCAB, (10, SEQ), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


class DeferredInit:
    def __init__(self, world_size):
        self.mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))

    def build(self, state):
        with torch.device("meta"):
            model = TinyLM()
        for modules in self.groups(model):
            fully_shard(modules, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        self.allocate_buffers(model)
        self.load(model, state)
        return model

    def groups(self, model):
        """The lists of modules whose parameters are gathered together."""
        yield from ([block] for block in model.blocks)
        yield [model.tok_embeddings, model.norm, model.output]  # tied: one group

    def allocate_buffers(self, model):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros_like(buffer, device="cpu"))

    def load(self, model, state):
        """``assign`` puts real tensors where the meta ones are, so that to_empty is not needed."""
        sharded = {}
        for name, target in model.state_dict().items():
            full = state[name].detach()
            if isinstance(target, DTensor):
                full = distribute_tensor(full, target.device_mesh, target.placements)
            sharded[name] = full
        model.load_state_dict(sharded, assign=True, strict=True)


def full_gradients(model):
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def step(model, shard, rank):
    sharded = DeferredInit(rank.world_size).build(model.state_dict())
    loss(sharded, shard).backward()
    return full_gradients(sharded)


case = Case(model=TinyLM, batch=batch, loss=loss, layout="1x2")
