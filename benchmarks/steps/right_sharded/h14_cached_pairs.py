"""Image and caption towers with in-batch negatives over all ranks, encoded twice in small chunks: once to know all
embeddings, once more to send the embeddings' gradients through the towers."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class TwoTowers(nn.Module):
    def __init__(self, dim=6, vocab=9):
        super().__init__()
        torch.manual_seed(71)
        self.image = nn.Sequential(nn.Conv2d(3, dim, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(dim * 4, dim))
        self.caption = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.joint = nn.Linear(dim, dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def encode(self, pixels, words):
        return (F.normalize(self.joint(self.image(pixels)), dim=-1),
                F.normalize(self.joint(self.caption(words)), dim=-1))


def info_nce(a, b, log_scale):
    logits = log_scale.exp() * a @ b.t()
    diagonal = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.t(), diagonal))


def loss(model, batch):
    return info_nce(*model.encode(batch["pixels"], batch["words"]), model.log_scale)


def gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


class PairCache:
    def __init__(self, model, chunk):
        self.model, self.chunk = model, chunk

    @torch.no_grad()
    def first_pass(self, shard):
        pieces = [self.model.encode(p, w) for p, w in self.chunks(shard)]
        return [torch.cat(side) for side in zip(*pieces)]

    def chunks(self, shard):
        return zip(shard["pixels"].split(self.chunk), shard["words"].split(self.chunk))

    def embedding_gradients(self, local, rank):
        """Every rank evaluates the whole loss; it keeps the rows of its own examples."""
        everyone = [gather(t).requires_grad_(True) for t in local]
        temperature = self.model.log_scale.detach().clone().requires_grad_(True)
        info_nce(*everyone, temperature).backward()
        rows = slice(rank.rank * len(local[0]), (rank.rank + 1) * len(local[0]))
        return [t.grad[rows] for t in everyone], temperature.grad

    def second_pass(self, shard, wanted):
        for (p, w), da, db in zip(self.chunks(shard), wanted[0].split(self.chunk), wanted[1].split(self.chunk)):
            a, b = self.model.encode(p, w)
            torch.autograd.backward([a, b], [da, db])


def step(model, shard, rank):
    cache = PairCache(model, chunk=1)
    local = cache.first_pass(shard)
    wanted, d_scale = cache.embedding_gradients(local, rank)
    cache.second_pass(shard, wanted)
    # rows of different ranks are different terms of one loss: a sum. The scale has seen all of it on each rank.
    for name, p in model.named_parameters():
        if name != "log_scale":
            dist.all_reduce(p.grad)
    model.log_scale.grad = d_scale
    return {name: p.grad for name, p in model.named_parameters()}


def pairs(g):
    return {"pixels": torch.randn(8, 3, 6, 6, generator=g), "words": torch.randint(0, 9, (8, 5), generator=g)}


case = Case(model=TwoTowers, batch=pairs, loss=loss, layout="1x4")
