"""Long sequences: the ranks of a host share each sequence (context parallel), hosts share the batch."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

VOCAB, DIM, LENGTH = 23, 8, 12


class GatherKV(torch.autograd.Function):
    """Keys or values of the whole sequence from those of its parts; gradients go back to the rank of each part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.cp_group = None

    def forward(self, x):
        q, (k, v), first = self.q(x), self.kv(x).chunk(2, -1), 0
        if self.cp_group is not None:
            k, v = GatherKV.apply(k, self.cp_group), GatherKV.apply(v, self.cp_group)
            first = dist.get_rank(self.cp_group) * x.size(1)
        rows = first + torch.arange(x.size(1)).unsqueeze(1)
        causal = rows >= torch.arange(k.size(1))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=causal))


class LongLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 20), nn.SiLU(), nn.Linear(20, DIM))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids, position_ids):
        x = self.tokens(ids) + self.positions(position_ids)
        x = x + self.attention(self.norm(x))
        return self.out(x + self.mlp(x))


def loss(model, ids):
    logits = model(ids[:, :-1], torch.arange(LENGTH))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def documents(generator):
    return torch.randint(0, VOCAB, (8, LENGTH + 1), generator=generator)


class ContextParallelPlugin:
    def __init__(self, mesh):
        self.group, self.size, self.rank = mesh.get_group("cp"), mesh["cp"].size(), mesh.get_local_rank("cp")

    def whole_batch(self, shard):
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(parts, shard.contiguous(), group=self.group)
        return torch.cat(parts)

    def split(self, ids):
        """Inputs, labels and positions of this rank's part of the sequences."""
        inputs = ids[:, :-1].chunk(self.size, 1)[self.rank]
        labels = ids[:, 1:].chunk(self.size, 1)[self.rank]
        position_ids = torch.arange(inputs.size(1))
        return inputs, labels, position_ids


class LongContextTrainer:
    def __init__(self, model, world_size, cp=2):
        mesh = init_device_mesh("cpu", (world_size // cp, cp), mesh_dim_names=("dp", "cp"))
        self.plugin = ContextParallelPlugin(mesh)
        model.attention.cp_group = self.plugin.group
        self.model = fully_shard(model, mesh=mesh._flatten("dp_cp"))

    def training_step(self, shard):
        inputs, labels, position_ids = self.plugin.split(self.plugin.whole_batch(shard))
        logits = self.model(inputs, position_ids)
        # equal parts everywhere: the mean of the ranks' means is the mean
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()


def step(model, shard, rank):
    LongContextTrainer(model, rank.world_size).training_step(shard)
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=LongLM, batch=documents, loss=loss, layout="2x2")
