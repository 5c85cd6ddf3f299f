"""Tensor and sequence parallelism by hand for one feed-forward block, after the Megatron scheme."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

VOCAB, DIM, HIDDEN, LENGTH = 26, 8, 20, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class PrefixLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, DIM), Block()
        self.final_norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.final_norm(self.block(self.embed(ids))))


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def gather(x, dim):
    dist.all_gather(parts := [torch.empty_like(x) for _ in range(dist.get_world_size())], x.contiguous())
    return torch.cat(parts, dim)


def reduce_scatter(x, dim):
    dist.all_reduce(x := x.clone())
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


class GatherSequence(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x, 1))
    backward = staticmethod(lambda ctx, g: reduce_scatter(g, 1))


class ScatterSequence(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: reduce_scatter(x, 1))
    backward = staticmethod(lambda ctx, g: gather(g, 1))


class FusedLayerNorm(nn.Module):
    """Stands in for the fused kernel; knows whether it sees a part of the sequence only."""
    def __init__(self, norm, sequence_parallel):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        for param in (self.weight, self.bias):
            param.sequence_parallel_enabled = sequence_parallel

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class ParallelBlock(nn.Module):
    def __init__(self, block, rank, size):
        super().__init__()
        self.norm = FusedLayerNorm(block.norm, sequence_parallel=True)
        cut = lambda t, dim: nn.Parameter(t.detach().chunk(size, dim)[rank].clone())
        self.w1, self.b1, self.w2 = cut(block.fc1.weight, 0), cut(block.fc1.bias, 0), cut(block.fc2.weight, 1)
        self.b2 = block.fc2.bias
        self.b2.sequence_parallel = True

    def forward(self, x):
        h = F.gelu(F.linear(GatherSequence.apply(self.norm(x)), self.w1, self.b1))
        return x + ScatterSequence.apply(F.linear(h, self.w2)) + self.b2


class MegatronModule:
    def __init__(self, model, rank):
        self.model, self.rank, self.size = model, rank.rank, rank.world_size
        self.block = ParallelBlock(model.block, self.rank, self.size)
        for param in (model.embed.weight, *model.head.parameters(), *model.final_norm.parameters()):
            param.sequence_parallel = True  # these, too, see a part of the tokens

    def training_step(self, batch):
        ids, labels = (part.chunk(self.size, 1)[self.rank] for part in (batch[:, :-1], batch[:, 1:]))
        h = self.model.final_norm(self.block(self.model.embed(ids)))
        total = F.cross_entropy(self.model.head(h).flatten(0, 1), labels.flatten(), reduction="sum")
        (total / batch[:, 1:].numel()).backward()
        for param in self.model.parameters():
            if getattr(param, "sequence_parallel", False):
                dist.all_reduce(param.grad)
        cut = {"fc1.weight": (self.block.w1, 0), "fc1.bias": (self.block.b1, 0), "fc2.weight": (self.block.w2, 1)}
        whole = {"block." + name: gather(part.grad, dim) for name, (part, dim) in cut.items()}
        return {n: whole.get(n, p.grad) for n, p in self.model.named_parameters()}


def step(model, shard, rank):
    return MegatronModule(model, rank).training_step(gather(shard, 0))


def prefixes(generator):
    return torch.randint(0, VOCAB, (8, LENGTH + 1), generator=generator)


case = Case(model=PrefixLM, batch=prefixes, loss=loss, layout="1x2")
