"""Neural collaborative filtering on a hybrid-sharded mesh, with gradients clipped by their global norm."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case

USERS, ITEMS, MAX_NORM = 23, 34, 0.05


class NeuMF(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.user_mlp, self.item_mlp = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.tower = nn.Sequential(nn.Linear(2 * dim, 12), nn.ELU(), nn.Linear(12, 6), nn.ELU())
        self.predict = nn.Linear(dim + 6, 1)

    def forward(self, user, item):
        gmf = self.user_gmf(user) * self.item_gmf(item)
        mlp = self.tower(torch.cat([self.user_mlp(user), self.item_mlp(item)], -1))
        return self.predict(torch.cat([gmf, mlp], -1)).squeeze(-1)


def ratings(generator):
    return {
        "user": torch.randint(0, USERS, (16,), generator=generator),
        "item": torch.randint(0, ITEMS, (16,), generator=generator),
        "stars": torch.randint(1, 6, (16,), generator=generator),
    }


def objective(model, batch):
    score = model(batch["user"], batch["item"])
    return F.huber_loss(score, batch["stars"].to(score) / 5)


def clipped_objective(model, batch):
    """The objective, scaled so that its gradient has at most MAX_NORM."""
    value = objective(model, batch)
    grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    norm = torch.stack([g.norm() for g in grads]).norm()
    return value * (MAX_NORM / norm).clamp(max=1.0).detach()


class ParallelState:
    """One mesh for all; groups are derived from it."""

    def __init__(self, replicas, shards):
        self.mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    @property
    def dp_group(self):
        return self.mesh._flatten("dp").get_group()

    @property
    def dp_shard_group(self):
        return self.mesh.get_group("dp_shard")


@torch.no_grad()
def clip_grad_norm(parameters, max_norm, group):
    """Clip by the l2 norm of all gradients; the squares of the local shards are added up over `group`."""
    shards = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    total = torch.stack([g.square().sum() for g in shards]).sum()
    dist.all_reduce(total, group=group)
    coef = (max_norm / total.sqrt()).clamp(max=1.0)
    torch._foreach_mul_(shards, coef)
    return total.sqrt()


class RatingTask:
    def __init__(self, model, state):
        self.state = state
        fully_shard(model.tower, mesh=state.mesh)
        self.model = fully_shard(model, mesh=state.mesh)

    def on_train_batch(self, batch):
        objective(self.model, batch).backward()

    def on_before_optimizer_step(self):
        self.grad_norm = clip_grad_norm(self.model.parameters(), MAX_NORM, self.state.dp_group)


def step(model, shard, rank):
    task = RatingTask(model, ParallelState(2, rank.world_size // 2))
    task.on_train_batch(shard)
    task.on_before_optimizer_step()
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=NeuMF, batch=ratings, loss=clipped_objective, layout="2x2")
