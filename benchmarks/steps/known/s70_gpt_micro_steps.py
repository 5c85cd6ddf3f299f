"""GPT-like training loop: one file of token blocks, read in micro-batches by all ranks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, BLOCK = 10, 5

# -----------------------------------------------------------------------------
batch_size = 2  # blocks in a micro-batch
gradient_accumulation_steps = 6  # over all ranks
# -----------------------------------------------------------------------------


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, 8)
        self.wpe = nn.Embedding(BLOCK, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.lm_head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        # a token sees the mean of what precedes it
        steps = torch.arange(1, idx.size(1) + 1, dtype=x.dtype, device=x.device).view(1, -1, 1)
        x = x + self.mlp(x.cumsum(1) / steps)
        logits = self.lm_head(x)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


def loss(model, batch):
    return model(batch["blocks"][:, :-1], batch["blocks"][:, 1:])


def make_batch(generator):
    blocks = batch_size * gradient_accumulation_steps
    return {"blocks": torch.randint(0, VOCAB, (blocks, BLOCK + 1), generator=generator)}


case = Case(model=GPT, batch=make_batch, loss=loss, layout="1x2", shards="own")


class BlockReader:
    def __init__(self, blocks, rank, world_size):
        self.blocks = blocks
        self.rank = rank
        self.world_size = world_size

    def get_batch(self, micro_step):
        # every rank reads a stretch of consecutive micro-batches
        first = (self.rank * self.world_size + micro_step) * batch_size
        chunk = self.blocks[first : first + batch_size]
        return chunk[:, :-1], chunk[:, 1:]


def step(model, shard, rank):
    model.zero_grad(set_to_none=True)
    ddp_model = DDP(model)
    assert gradient_accumulation_steps % rank.world_size == 0
    micro_steps = gradient_accumulation_steps // rank.world_size
    reader = BlockReader(shard["blocks"], rank.rank, rank.world_size)
    for micro_step in range(micro_steps):
        # gradients are only needed in sync at the last micro step
        ddp_model.require_backward_grad_sync = micro_step == micro_steps - 1
        x, y = reader.get_batch(micro_step)
        value = ddp_model(x, y) / micro_steps
        value.backward()
