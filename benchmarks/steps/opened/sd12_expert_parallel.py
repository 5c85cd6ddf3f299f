"""Mixture of experts with DTensor: experts over the ranks of a node, data parallel between nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class MoEConfig:
    features: int = 6
    dim: int = 8
    hidden: int = 5
    experts: int = 4
    outputs: int = 3


class Experts(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(cfg.experts, cfg.dim, cfg.hidden) / cfg.dim**0.5)
        self.w2 = nn.Parameter(torch.randn(cfg.experts, cfg.hidden, cfg.dim) / cfg.hidden**0.5)
        self.mesh = None

    def parallelize(self, mesh):
        self.mesh = mesh
        for name, weight in list(self.named_parameters()):
            sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
            setattr(self, name, nn.Parameter(sharded))

    def dispatch(self, x):
        """What the experts of this rank get: all of the tokens, or their own columns."""
        return DTensor.from_local(x, self.mesh, [Replicate()]).to_local()

    def combine(self, y):
        partial = DTensor.from_local(y, self.mesh, [Partial()])
        return partial.redistribute(placements=[Replicate()]).to_local()

    def forward(self, tokens, gates):
        if self.mesh is None:
            return self.run(tokens, gates, self.w1, self.w2)
        w1, w2 = self.w1.to_local(), self.w2.to_local()
        first = self.mesh.get_local_rank() * len(w1)
        tokens, gates = self.dispatch(tokens), self.dispatch(gates)
        return self.combine(self.run(tokens, gates[:, first : first + len(w1)], w1, w2))

    @staticmethod
    def run(tokens, gates, w1, w2):
        hidden = F.relu(torch.einsum("nd,edh->enh", tokens, w1))
        return torch.einsum("enh,ehd,ne->nd", hidden, w2, gates)


class MoEModel(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = MoEConfig()
        self.stem = nn.Linear(cfg.features, cfg.dim)
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.experts = Experts(cfg)
        self.head = nn.Linear(cfg.dim, cfg.outputs)

    def forward(self, x):
        tokens = torch.tanh(self.stem(x))
        gates = self.router(tokens).softmax(-1)
        return self.head(tokens + self.experts(tokens, gates))


class ExpertParallelTrainer:
    def __init__(self, model, rank):
        mesh = init_device_mesh(
            "cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("dp", "ep")
        )
        self.dp, self.ep = mesh["dp"], mesh["ep"]
        model.experts.parallelize(self.ep)
        self.model = model

    def shared_rows(self, batch):
        """All ranks of a node compute with the rows of the node."""
        gathered = {}
        for key, value in batch.items():
            pieces = [torch.empty_like(value) for _ in range(self.ep.size())]
            dist.all_gather(pieces, value, group=self.ep.get_group())
            gathered[key] = torch.cat(pieces)
        return gathered

    def reduce_gradients(self):
        for parameter in self.model.parameters():
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            dist.all_reduce(local, group=self.dp.get_group())
            local.div_(self.dp.size())

    def training_step(self, batch):
        loss(self.model, self.shared_rows(batch)).backward()
        self.reduce_gradients()


def make_batch(generator):
    return {
        "x": torch.randn(12, 6, generator=generator),
        "y": torch.randn(12, 3, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def step(model, shard, rank):
    ExpertParallelTrainer(model, rank).training_step(shard)


case = Case(model=MoEModel, batch=make_batch, loss=loss, layout="2x2")
