"""Expert-parallel engine: experts live on the ranks of a node, dense weights everywhere."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from ddp_equivalence import Case

DIM, EXPERTS = 8, 4


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class SwitchRegressor(nn.Module):
    """Embedding, one switch layer, and a read-out per token."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, DIM)
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.out = nn.Linear(DIM, 1)
        self.dispatcher = None

    def forward(self, x):
        h = self.inp(x).flatten(0, 1)
        prob, index = self.gate(h).softmax(-1).max(-1)
        if self.dispatcher is None:
            y = torch.zeros_like(h)
            for e, expert in enumerate(self.experts):
                y = y.index_put((index == e).nonzero(as_tuple=True), expert(h[index == e]))
        else:
            y = self.dispatcher(self.experts, h, index)
        return self.out(h + prob.unsqueeze(1) * y).view(x.shape[:2])


class AllToAllDispatcher:
    def __init__(self, group):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.per_rank = EXPERTS // self.size

    def owned(self, experts):
        return experts[self.rank * self.per_rank : (self.rank + 1) * self.per_rank]

    def __call__(self, experts, h, index):
        order = index.argsort(stable=True)
        counts = torch.bincount(index, minlength=EXPERTS)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=self.group)
        incoming = incoming.view(self.size, self.per_rank)
        send, receive = counts.view(self.size, -1).sum(1).tolist(), incoming.sum(1).tolist()
        tokens = all_to_all_single_autograd(h[order], receive, send, self.group)
        which = torch.arange(self.per_rank).repeat(self.size).repeat_interleave(incoming.flatten())
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.owned(experts)):
            y = y.index_put((which == e).nonzero(as_tuple=True), expert(tokens[which == e]))
        y = all_to_all_single_autograd(y, send, receive, self.group)
        return torch.zeros_like(h).index_put((order,), y)


class MoEEngine:
    def __init__(self, model, ep_size):
        self.model, self.world = model, dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (self.world // ep_size, ep_size), mesh_dim_names=("expert_dp", "ep"))
        model.dispatcher = AllToAllDispatcher(self.mesh.get_group("ep"))

    def average(self, param, group):
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad, group=group)
        param.grad.div_(dist.get_world_size(group))

    def allreduce_gradients(self):
        experts = {id(p) for p in self.model.experts.parameters()}
        for param in self.model.parameters():
            self.average(param, self.mesh.get_group("expert_dp") if id(param) in experts else None)

    def collect(self):
        """Every owner shows its experts to the rest of its node, as for a checkpoint."""
        group, per_rank = self.mesh.get_group("ep"), self.model.dispatcher.per_rank
        for e, expert in enumerate(self.model.experts):
            for p in expert.parameters():
                dist.broadcast(p.grad, group=group, group_src=e // per_rank)
        return {n: p.grad for n, p in self.model.named_parameters()}


def step(model, shard, rank):
    engine = MoEEngine(model, ep_size=2)
    loss(model, shard).backward()
    engine.allreduce_gradients()
    return engine.collect()


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"].to(batch["x"]))


def make_batch(generator):
    return {"x": torch.randn(8, 6, 5, generator=generator), "y": torch.randn(8, 6, generator=generator)}


case = Case(model=SwitchRegressor, batch=make_batch, loss=loss, layout="2x2")
