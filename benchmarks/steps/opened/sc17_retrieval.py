"""Dense retrieval with in-batch negatives from all ranks, the encoder sharded by FSDP1."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case

TEMPERATURE = 0.2


class Encoder(nn.Module):
    """A query encoder and a document encoder in one module, so that FSDP sees one forward."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 6))
        self.document = nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, queries, documents):
        return (
            F.normalize(self.query(queries), dim=1),
            F.normalize(self.document(documents), dim=1),
        )


def pairs(generator):
    return {
        "queries": torch.randn(12, 7, generator=generator),
        "documents": torch.randn(12, 9, generator=generator),
    }


def info_nce(queries, documents, first=0):
    """Query i belongs to document ``first`` + i; all other documents are negatives."""
    scores = queries @ documents.T / TEMPERATURE
    return F.cross_entropy(scores, first + torch.arange(len(queries)))


def loss(model, batch):
    return info_nce(*model(batch["queries"], batch["documents"]))


class GatherRows(torch.autograd.Function):
    """Rows of all ranks, one below the other."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Retriever:
    def __init__(self, encoder):
        self.encoder = FSDP(
            encoder,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    def loss(self, batch):
        queries, documents = self.encoder(batch["queries"], batch["documents"])
        everything = GatherRows.apply(documents)
        return info_nce(queries, everything, first=dist.get_rank() * len(queries))

    def full_gradients(self):
        with FSDP.summon_full_params(self.encoder, with_grads=True):
            return {
                name.replace("_fsdp_wrapped_module.", ""): parameter.grad.clone()
                for name, parameter in self.encoder.named_parameters()
            }


def step(model, shard, rank):
    retriever = Retriever(model)
    retriever.loss(shard).backward()
    return retriever.full_gradients()


case = Case(model=Encoder, batch=pairs, loss=loss, layout="1x2")
