"""Causal language model trainer: the loss is a mean over all tokens of the global batch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB = 11
IGNORE = -100


class TinyCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.mlp = nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, VOCAB, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.tanh(self.mlp(hidden)))


def causal_lm_loss(logits, labels, num_items):
    flat = logits[:, :-1].reshape(-1, VOCAB)
    total = F.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction="sum")
    return total / num_items


def loss(model, batch):
    num_items = (batch["labels"][:, 1:] != IGNORE).sum()
    return causal_lm_loss(model(batch["input_ids"]), batch["labels"], num_items)


def make_batch(generator):
    ids = torch.randint(0, VOCAB, (12, 7), generator=generator)
    lengths = torch.randint(3, 8, (12, 1), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(7) >= lengths, IGNORE)}


case = Case(model=TinyCausalLM, batch=make_batch, loss=loss, layout="2x2")


@dataclass
class TrainingArguments:
    n_gpu: int
    world_size: int
    average_tokens_across_devices: bool = True


class Trainer:
    def __init__(self, model, args):
        self.args = args
        self.model = DDP(model)

    def get_num_items(self, inputs):
        num_items = (inputs["labels"][:, 1:] != IGNORE).sum()
        if self.args.average_tokens_across_devices:
            dist.all_reduce(num_items)
        return num_items

    def compute_loss(self, inputs, num_items):
        value = causal_lm_loss(self.model(inputs["input_ids"]), inputs["labels"], num_items)
        if self.args.average_tokens_across_devices:
            # the wrapper averages gradients, and num_items is already a sum over devices
            value = value * self.args.n_gpu
        return value

    def training_step(self, inputs):
        self.model.train()
        num_items = self.get_num_items(inputs)
        value = self.compute_loss(inputs, num_items)
        value.backward()
        return value.detach()


def step(model, shard, rank):
    args = TrainingArguments(n_gpu=rank.local_world_size, world_size=rank.world_size)
    model.zero_grad()
    Trainer(model, args).training_step(shard)
