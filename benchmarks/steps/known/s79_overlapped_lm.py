"""Language model with overlapped communication: a gradient is summed as soon as it is there."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

VOCAB = 10


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
        self.decoder = nn.Linear(6, VOCAB)
        self.decoder.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.decoder(hidden + self.body(hidden))


def summed_loss(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten(), reduction="sum")


def loss(model, batch):
    return summed_loss(model, batch) / batch["next"].numel()


def make_batch(generator):
    text = torch.randint(0, VOCAB, (9, 6), generator=generator)
    return {"tokens": text[:, :-1], "next": text[:, 1:]}


case = Case(model=LanguageModel, batch=make_batch, loss=loss, layout="1+2")


class OverlappedSum:
    """Starts the reduction of a gradient during the backward pass; ``join`` waits for all."""

    def __init__(self, model, group=None):
        self.group = group
        self.works = []
        self.handles = []
        for _, p in model.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                self.handles.append(p.register_post_accumulate_grad_hook(self.launch))

    def launch(self, p):
        self.works.append(dist.all_reduce(p.grad, group=self.group, async_op=True))

    def join(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def remove(self):
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    model.zero_grad()
    reducer = OverlappedSum(model)
    tokens = torch.tensor(shard["next"].numel(), device=rank.device)
    dist.all_reduce(tokens)
    # divided by the tokens of all ranks, so that the gradients only have to be summed
    (summed_loss(model, shard) / tokens).backward()
    reducer.join()
    reducer.remove()
