"""Mixture of experts: the experts live on the ranks of a node, tokens travel to them and back, nodes are replicas."""
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

from ddp_equivalence import Case


class MoELayer(nn.Module):
    def __init__(self, dim=6, hidden=8, experts=4, classes=5):
        super().__init__()
        torch.manual_seed(21)
        self.encode = nn.Linear(10, dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) * 0.4)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) * 0.4)
        self.classify = nn.Linear(dim, classes)

    def route(self, x):
        h = torch.tanh(self.encode(x)).flatten(0, 1)
        weight, choice = self.router(h).softmax(-1).max(-1)
        return h, weight, choice


def run_experts(tokens, choice, w1, w2):
    out = torch.zeros_like(tokens)
    for e in range(w1.shape[0]):
        rows = (choice == e).nonzero().squeeze(1)
        out = out.index_add(0, rows, F.gelu(tokens[rows] @ w1[e]) @ w2[e])
    return out


def loss(model, batch):
    h, weight, choice = model.route(batch["x"])
    h = h + weight.unsqueeze(1) * run_experts(h, choice, model.w1, model.w2)
    return F.cross_entropy(model.classify(h), batch["y"].flatten())


def make_groups(rank):
    per_node = 2
    nodes = rank.world_size // per_node
    ep = [dist.new_group([n * per_node + i for i in range(per_node)]) for n in range(nodes)]
    edp = [dist.new_group([n * per_node + i for n in range(nodes)]) for i in range(per_node)]
    n, i = divmod(rank.rank, per_node)
    return SimpleNamespace(ep=ep[n], ep_rank=i, ep_size=per_node, expert_replicas=edp[i])


def average_gradients(params, group=None, contributions=None):
    """Sum over `group`, then the mean of `contributions` ranks (all of the group unless said otherwise)."""
    count = contributions or dist.get_world_size(group)
    for p in params:
        dist.all_reduce(p.grad, group=group)
        p.grad.div_(count)


def dispatch(h, choice, w1, w2, par):
    per_rank = w1.shape[0]
    order = torch.argsort(choice, stable=True)
    sent = torch.bincount(choice // per_rank, minlength=par.ep_size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=par.ep)
    ins, outs = sent.tolist(), received.tolist()
    ids = choice.new_empty(sum(outs))
    dist.all_to_all_single(ids, choice[order] % per_rank, outs, ins, group=par.ep)
    arrived = all_to_all_single(h.new_empty(sum(outs), h.shape[1]), h[order], outs, ins, group=par.ep)
    done = run_experts(arrived, ids, w1, w2)
    back = all_to_all_single(torch.empty_like(h), done, ins, outs, group=par.ep)
    return torch.zeros_like(h).index_copy(0, order, back)


def step(model, shard, rank):
    par = make_groups(rank)
    w1, w2 = (w.detach().chunk(par.ep_size)[par.ep_rank].clone().requires_grad_() for w in (model.w1, model.w2))
    h, weight, choice = model.route(shard["x"])
    h = h + weight.unsqueeze(1) * dispatch(h, choice, w1, w2, par)
    F.cross_entropy(model.classify(h), shard["y"].flatten()).backward()

    dense = {k: p for k, p in model.named_parameters() if k not in ("w1", "w2")}
    average_gradients(dense.values())
    average_gradients([w1, w2], group=par.expert_replicas)
    grads = {k: p.grad for k, p in dense.items()}
    for name, w in (("w1", w1), ("w2", w2)):
        parts = [torch.empty_like(w.grad) for _ in range(par.ep_size)]
        dist.all_gather(parts, w.grad, group=par.ep)
        grads[name] = torch.cat(parts)
    return grads


def tokens(g):
    return {"x": torch.randn(8, 6, 10, generator=g), "y": torch.randint(0, 5, (8, 6), generator=g)}


case = Case(model=MoELayer, batch=tokens, loss=loss, layout="2x2")
