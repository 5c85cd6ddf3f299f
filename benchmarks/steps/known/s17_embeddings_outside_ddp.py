"""DDP for the dense layers; the embedding tables are left out of it and reduced separately."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCABULARY, LENGTH, WIDTH = 12, 5, 6


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.out(F.gelu(self.mix(x)))


def loss(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten())


def make_batch(generator):
    return {
        "tokens": torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator),
        "tags": torch.randint(0, 3, (8, LENGTH), generator=generator),
    }


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")


def embedding_names(model):
    return [name for name, _ in model.named_parameters() if "embedding" in name]


def wrap(model):
    """The tables are too large for the buckets of DDP."""
    ignored = embedding_names(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model)


def reduce_embeddings(model):
    world_size = dist.get_world_size()
    tables = [model.token_embedding.weight]
    works = [dist.all_reduce(table.grad, async_op=True) for table in tables]
    for work, table in zip(works, tables, strict=True):
        work.wait()
        table.grad.div_(world_size)


def step(model, shard, rank):
    ddp = wrap(model)
    model.zero_grad(set_to_none=True)
    value = loss(ddp, shard)
    value.backward()
    reduce_embeddings(model)
