"""Cross entropy over a vocabulary that is split inside each node; nodes are data parallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, WIDTH, LENGTH, EXAMPLES, SPLIT = 12, 8, 5, 16, 2


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Every rank has the logits of its own words; the targets are those of all words."""

    @staticmethod
    def forward(ctx, logits, target, first, group):
        peak = logits.max(dim=-1).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        logits = logits - peak.unsqueeze(-1)
        words = logits.size(-1)
        elsewhere = (target < first) | (target >= first + words)
        local_target = (target - first).masked_fill(elsewhere, 0)
        rows = torch.arange(target.numel())
        hit = logits[rows, local_target].masked_fill(elsewhere, 0.0)
        dist.all_reduce(hit, group=group)
        exponents = logits.exp()
        total = exponents.sum(dim=-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exponents / total.unsqueeze(-1), local_target, elsewhere)
        return total.log() - hit

    @staticmethod
    def backward(ctx, grad):
        softmax, local_target, elsewhere = ctx.saved_tensors
        rows = torch.arange(local_target.numel())
        softmax = softmax.clone()
        softmax[rows, local_target] -= 1.0
        return softmax * grad.unsqueeze(-1), None, None, None


class SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, tokens):
        return self.recurrent(self.embedding(tokens))[0].flatten(0, 1)

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["targets"].flatten())


def make_batch(generator):
    text = torch.randint(VOCABULARY, (EXAMPLES, LENGTH + 1), generator=generator)
    return {"tokens": text[:, :-1].clone(), "targets": text[:, 1:].clone()}


case = Case(model=LanguageModel, batch=make_batch, loss=loss, layout="2x2", shards="own")


def parallel_loss(model, batch, group):
    hidden = SumOfGradients.apply(model.hidden(batch["tokens"]), group)
    words = VOCABULARY // dist.get_world_size(group)
    first = words * dist.get_rank(group)
    logits = F.linear(hidden, model.head.weight[first : first + words])
    losses = VocabParallelCrossEntropy.apply(logits, batch["targets"].flatten(), first, group)
    return losses.mean()


def reduce_gradients(model, vocabulary_group, data_group):
    dist.all_reduce(model.head.weight.grad, group=vocabulary_group)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=data_group)
        parameter.grad /= dist.get_world_size(data_group)


def step(model, batch, rank):
    replicas = rank.world_size // SPLIT
    mesh = init_device_mesh("cpu", (replicas, SPLIT), mesh_dim_names=("data", "vocabulary"))
    replica = mesh.get_local_rank("data")
    mine = {name: tensor.chunk(replicas)[replica] for name, tensor in batch.items()}
    parallel_loss(model, mine, mesh.get_group("vocabulary")).backward()
    reduce_gradients(model, mesh.get_group("vocabulary"), mesh.get_group("data"))
