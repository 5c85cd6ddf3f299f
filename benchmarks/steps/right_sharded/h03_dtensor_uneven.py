"""Molecule property regressor with its hidden channels laid out over four ranks as DTensors.
Ten and seven channels do not divide by four; DTensor lets the last ranks have fewer."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ddp_equivalence import Case


class DeepSet(nn.Module):
    """phi on atoms, a masked sum over atoms, rho on molecules."""

    def __init__(self, features=5, hidden=10, out=7):
        super().__init__()
        torch.manual_seed(2)
        self.phi_in = nn.Linear(features, hidden)
        self.phi_out = nn.Linear(hidden, hidden, bias=False)
        self.rho_in = nn.Linear(hidden, out)
        self.rho_out = nn.Linear(out, 2)

    def forward(self, atoms, present):
        h = self.phi_out(F.silu(self.phi_in(atoms)))
        h = (h * present.unsqueeze(-1)).sum(1)
        return self.rho_out(F.silu(self.rho_in(h)))


def loss(model, batch):
    return F.huber_loss(model(batch["atoms"], batch["present"]), batch["target"])


PLAN = {
    "phi_in.weight": Shard(0), "phi_in.bias": Shard(0), "phi_out.weight": Shard(1),
    "rho_in.weight": Shard(0), "rho_in.bias": Shard(0), "rho_out.weight": Shard(1), "rho_out.bias": Replicate(),
}


def lay_out(model, mesh):
    return {name: nn.Parameter(distribute_tensor(p.detach(), mesh, [PLAN[name]])) for name, p in model.named_parameters()}


def pair(x, w_in, b_in, w_out):
    """Column-wise then row-wise; what comes out is a sum over ranks that has not been taken yet."""
    h = F.silu(F.linear(x, w_in, b_in))
    return torch.matmul(h, w_out.t())


def forward(w, atoms, present, mesh):
    replicated = [Replicate()]
    h = pair(atoms, w["phi_in.weight"], w["phi_in.bias"], w["phi_out.weight"])
    h = (h.redistribute(mesh, replicated) * present.unsqueeze(-1)).sum(1)
    y = pair(h, w["rho_in.weight"], w["rho_in.bias"], w["rho_out.weight"])
    return y.redistribute(mesh, replicated) + w["rho_out.bias"]


def gathered(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def step(model, shard, rank):
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("tp",))
    weights = lay_out(model, mesh)
    batch = {k: distribute_tensor(gathered(v), mesh, [Replicate()]) for k, v in shard.items()}
    prediction = forward(weights, batch["atoms"], batch["present"], mesh)
    error = (prediction - batch["target"]).to_local()
    size = error.abs()
    value = torch.where(size < 1, 0.5 * error.square(), size - 0.5).mean()
    value.backward()
    return {name: w.grad.full_tensor() for name, w in weights.items()}


def molecules(g):
    sizes = torch.randint(2, 7, (12, 1), generator=g)
    return {
        "atoms": torch.randn(12, 6, 5, generator=g),
        "present": (torch.arange(6).view(1, 6) < sizes).float(),
        "target": 2 * torch.randn(12, 2, generator=g),
    }


case = Case(model=DeepSet, batch=molecules, loss=loss, layout="1x4")
