"""Masked language modelling, normalised by the number of masked tokens of all ranks."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddp_equivalence import Case

MASK = 0


@dataclass
class JobConfig:
    vocab: int = 33
    dim: int = 12
    depth: int = 2
    seq_len: int = 10
    mask_prob: float = 0.3


JOB = JobConfig()


class Fourier(nn.Module):
    """Token mixing without attention: a Fourier transform over positions and channels, real part only."""

    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = self.ln1(x + torch.fft.fft2(x, norm="ortho").real)
        return self.ln2(x + self.ff(x))


class FNet(nn.Module):
    def __init__(self, job=JOB):
        super().__init__()
        self.tok = nn.Embedding(job.vocab, job.dim)
        self.pos = nn.Parameter(0.1 * torch.randn(job.seq_len, job.dim))
        self.layers = nn.ModuleList(Fourier(job.dim) for _ in range(job.depth))
        self.lm = nn.Linear(job.dim, job.vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.lm(x)


def text(generator):
    target = torch.randint(1, JOB.vocab, (16, JOB.seq_len), generator=generator)
    masked = torch.rand(16, JOB.seq_len, generator=generator) < JOB.mask_prob
    masked[:, 0] = True
    return {"ids": target.masked_fill(masked, MASK), "labels": target.masked_fill(~masked, -100)}


def sum_loss(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def mean_loss(model, batch):
    return sum_loss(model, batch) / (batch["labels"] != -100).sum()


def apply_fsdp(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    disable_gradient_division(model)
    return model


def disable_gradient_division(model):
    """The training loop divides by the global number of valid tokens, so FSDP is to add up only."""
    model.set_gradient_divide_factor(1.0)


class Trainer:
    def __init__(self, model, world_size):
        self.mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        self.model = apply_fsdp(model, self.mesh)

    def valid_tokens(self, labels):
        count = (labels != -100).sum()
        dist.all_reduce(count, group=self.mesh.get_group("fsdp"))
        return count

    def forward_backward_step(self, batch):
        (sum_loss(self.model, batch) / self.valid_tokens(batch["labels"])).backward()


def step(model, shard, rank):
    Trainer(model, rank.world_size).forward_backward_step(shard)
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=FNet, batch=text, loss=mean_loss, layout="1x4")
