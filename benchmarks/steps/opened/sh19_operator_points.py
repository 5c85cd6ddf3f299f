"""Neural operator on scattered points with DTensor: the points are spread over the ranks, weights are copies. The
norm is written on local tensors, for a fused kernel that knows nothing of DTensor."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ddp_equivalence import Case


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Operator(nn.Module):
    def __init__(self, fields=4, dim=8):
        super().__init__()
        torch.manual_seed(37)
        self.lift = nn.Linear(fields, dim)
        self.norm = nn.Parameter(1 + 0.1 * torch.randn(dim))
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.project = nn.Linear(dim, 1)

    def forward(self, x):
        h = self.lift(x)
        n = rms(h, self.norm)
        kernel = self.key(n).transpose(1, 2) @ h / x.shape[1]  # [B, dim, dim], a sum over points
        return self.project(F.gelu(h + self.query(n) @ kernel)).squeeze(-1)


def loss(model, batch):
    return (model(batch["points"]) - batch["pressure"]).square().mean()


def local_rms(x, weight, mesh):
    out = rms(x.to_local(), weight.to_local())
    return DTensor.from_local(out, mesh, x.placements)


def spread_forward(w, x, mesh):
    h = F.linear(x, w["lift.weight"], w["lift.bias"])
    n = local_rms(h, w["norm"], mesh)
    key = F.linear(n, w["key.weight"])
    kernel = torch.matmul(key.transpose(1, 2), h).redistribute(mesh, [Replicate()]) / x.shape[1]
    h = h + torch.matmul(F.linear(n, w["query.weight"]), kernel)
    return F.linear(F.gelu(h), w["project.weight"], w["project.bias"]).squeeze(-1)


def gather_batch(shard):
    full = {}
    for k, v in shard.items():
        parts = [torch.empty_like(v) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, v.contiguous())
        full[k] = torch.cat(parts)
    return full


def step(model, shard, rank):
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("points",))
    batch = {k: distribute_tensor(v, mesh, [Shard(1)]) for k, v in gather_batch(shard).items()}
    weights = {k: nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])) for k, p in model.named_parameters()}
    error = spread_forward(weights, batch["points"], mesh) - batch["pressure"]
    value = error.square().sum().redistribute(mesh, [Replicate()]) / error.numel()
    value.backward()
    return {k: w.grad.full_tensor() for k, w in weights.items()}


def airfoils(g):
    points = torch.randn(8, 6, 4, generator=g)
    return {"points": points, "pressure": points[..., 0] * points[..., 1] + 0.2 * torch.randn(8, 6, generator=g)}


case = Case(model=Operator, batch=airfoils, loss=loss, layout="1x2")
