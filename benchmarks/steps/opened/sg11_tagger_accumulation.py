"""Token tagger trained in micro-batches under fully_shard, with recomputed layers and one reduction per update."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case


@dataclass
class TrainingArguments:
    micro_batch_size: int = 3
    gradient_checkpointing: bool = True
    width: int = 16
    layers: int = 2
    tags: int = 9
    vocab: int = 41


ARGS = TrainingArguments()


class Tagger(nn.Module):
    def __init__(self, args=ARGS):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(args.width, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(args.layers)
        )
        self.head = nn.Linear(args.width, args.tags)
        self.recompute = False

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def sentences(generator):
    ids = torch.randint(0, ARGS.vocab, (14, 8), generator=generator)
    return {"ids": ids, "tags": torch.randint(0, ARGS.tags, (14, 8), generator=generator)}


def tag_loss(model, batch, reduction="mean"):
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), reduction=reduction)


class GradientState:
    """Counts micro-batches; the gradients are reduced once `steps` of them have been seen."""

    def __init__(self, steps):
        self.steps, self.seen = steps, 0

    def advance(self):
        self.seen += 1
        return self.seen % self.steps == 0


class ShardedTrainer:
    def __init__(self, model, args):
        self.args = args
        model.recompute = args.gradient_checkpointing
        for block in model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)

    def micro_batches(self, batch):
        pieces = {name: values.split(self.args.micro_batch_size) for name, values in batch.items()}
        return [dict(zip(pieces, values)) for values in zip(*pieces.values())]

    def accumulation_steps(self, batch):
        return max(1, len(batch["ids"]) // self.args.micro_batch_size)

    def update(self, batch):
        state = GradientState(self.accumulation_steps(batch))
        tokens = batch["tags"].numel()
        for piece in self.micro_batches(batch):
            self.model.set_requires_gradient_sync(state.advance())
            (tag_loss(self.model, piece, reduction="sum") / tokens).backward()


def step(model, shard, rank):
    trainer = ShardedTrainer(model, ARGS)
    trainer.update(shard)
    return {name: p.grad for name, p in model.named_parameters()}


case = Case(model=Tagger, batch=sentences, loss=tag_loss, layout="1x2")
